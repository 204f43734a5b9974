"""Values that YAML reads as something else than their characters. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from launcher.written.texts import is_text_place, to_text

_TAG = "tag:yaml.org,2002:"
_DIGITS_MAX = 1000
"""Of a whole number to any base; Python refuses to write one of 4,300 decimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A value without quotes that YAML reads as a number, true or false."""

    place: tuple[str | int, ...]
    text: str
    value: Any
    line: int
    is_key: bool = False

    @property
    def is_changed_text(self) -> bool:
        """Return whether the value belongs to a section of texts, and is read as another text."""
        is_text = is_text_place(self.place[:-1]) and not self.is_key
        return is_text and to_text(self.value) != self.text

    @property
    def problem(self) -> str | None:
        """Say why the value is refused, None for most values and for all that are texts."""
        if self.is_changed_text:
            return None
        kind = type(self.value)
        if kind is bool and self.text.lower() not in ("true", "false"):
            what = "true or false"
        elif kind is not bool and ":" in self.text:
            what = "a number to the base 60"
        elif kind is int and re.fullmatch(r"[-+]?0[0-9_]+", self.text):
            what = "an octal number"
        else:
            return None
        read = to_text(self.value)
        return f"YAML reads {self.text} as {what}, {read}; write {read}, or the text in quotes"


def find_scalars(text: str, place: tuple[str, ...] = ()) -> Iterator[Scalar]:
    """Yield the values of a YAML text that are read as numbers, true or false.

    `place` is the section that the text's keys lie in. Values that `<<` merges come first, at the
    place that they are merged into, where that has no value of its own. Raises yaml.YAMLError, also
    where a key is given twice.
    """
    root = yaml.compose(text, _loader())
    return iter(()) if root is None else _scalars(root, place)


@cache
def _loader() -> Any:
    """Return PyYAML's fast loader with the forms of values that OmegaConf knows."""
    from omegaconf._utils import get_yaml_loader

    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    forms = get_yaml_loader().yaml_implicit_resolvers
    return type("_Loader", (fast,), {"yaml_implicit_resolvers": forms})


def _scalars(node: yaml.Node, place: tuple[str | int, ...]) -> Iterator[Scalar]:
    if isinstance(node, yaml.ScalarNode):
        value = _value(node)
        if value is not None:
            line = node.start_mark.line + 1
            yield Scalar(place=place, text=node.value, value=value, line=line)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scalars(item, (*place, index))
    elif isinstance(node, yaml.MappingNode):
        _check_once([key for key, _ in node.value])
        merged = [value for key, value in node.value if key.tag == f"{_TAG}merge"]
        sources = [
            mapping
            for each in merged
            for mapping in (each.value if isinstance(each, yaml.SequenceNode) else (each,))
        ]
        # Which of two merged mappings wins depends on the version of PyYAML.
        _check_once([key for source in sources for key, _ in source.value])
        own = {str(key.value) for key, _ in node.value}
        for source in sources:
            for found in _scalars(source, place):
                if found.is_key or str(found.place[len(place)]) not in own:
                    yield found
        for key, value in node.value:
            if key.tag != f"{_TAG}merge":
                yield from (replace(each, is_key=True) for each in _scalars(key, place))
                yield from _scalars(value, (*place, str(key.value)))


def _value(node: yaml.ScalarNode) -> Any:
    """Return the number or truth value that a scalar without quotes is read as, else None."""
    if node.style:
        return None
    make = {"bool": "construct_yaml_bool", "int": "construct_yaml_int",
            "float": "construct_yaml_float"}.get(node.tag.removeprefix(_TAG))  # fmt: skip
    if make is None:
        return None
    if make == "construct_yaml_int" and len(node.value) > _DIGITS_MAX:
        problem = f"found a number of {len(node.value)} characters; allowed: {_DIGITS_MAX}"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    try:
        return getattr(SafeConstructor(), make)(node)
    except (ValueError, KeyError):
        # Of a text with an explicit tag; whoever reads the file says so.
        return None


def _check_once(keys: Sequence[yaml.Node]) -> None:
    """Raise a YAMLError where a key is there twice: one of its values would go unseen."""
    seen: dict[object, yaml.Node] = {}
    for key in keys:
        if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
            continue
        value = _value(key)
        same = (key.tag, key.value if value is None else value)
        first = seen.setdefault(same, key)
        if first is not key:
            raise yaml.constructor.ConstructorError(
                None, None, f"found duplicate key {key.value}, which line "
                f"{first.start_mark.line + 1} has as well", key.start_mark,
            )  # fmt: skip
