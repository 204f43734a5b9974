"""Values that JSON holds exactly, and the one text that stands for each. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | bool | None
"""What a recipe can hold. A tuple is written as a list."""


def to_json_text(value: Json, name: str) -> str:
    """Return the text of `value`: equal values give equal texts, in whatever order their keys are.

    Raises TypeError that says where in `name` something stands that JSON cannot hold: a key
    that is no text, a number that is not finite, any other type.
    """
    _check(value, name)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)


def _check(value: object, name: str) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            if type(key) is not str:
                raise TypeError(f"{name} has the key {key!r:.40}; want text as key, as JSON has it")
            _check(each, f"{name}[{key!r:.40}]")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            _check(each, f"{name}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{name} is {value}; want a finite number, as JSON has it")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(
            f"{name} is a {type(value).__name__}; want what JSON holds: "
            "text, numbers, true, false, null, lists and mappings of them"
        )
