"""Frozen dataclasses to JSON and back. Pure."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from resilience.validation import first_problem

T = TypeVar("T")
_adapters: dict[Any, TypeAdapter[Any]] = {}


def to_json(data: object, *, is_sorted: bool = False) -> bytes:
    """Return JSON data, which may hold dataclasses and sets, as text in one line."""
    separators = (",", ":")
    return json.dumps(data, separators=separators, sort_keys=is_sorted, default=_to_plain).encode()


def from_json(text: bytes, name: str = "JSON") -> Any:
    """Return what a text says; raises ValueError, with this name, for a text that is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no {name}: {text[:40]!r}") from error


def fields_of(record: Any) -> dict[str, Any]:
    """Return the fields by name; `asdict` copies all that is in them, ten times as slowly."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def read_record(kind: type[T], data: object, name: str) -> T:
    """Return what JSON data says, as a dataclass or a list or mapping of those.

    Raises ValueError, with this name of the kind, for other data.
    """
    try:
        adapter = _adapters.get(kind) or _adapters.setdefault(kind, TypeAdapter(kind))
        found: T = adapter.validate_python(data)
    except ValidationError as error:
        raise ValueError(f"the {name} cannot be read: {first_problem(error)}") from error
    return found


def _to_plain(value: object) -> object:
    return sorted(value) if isinstance(value, (set, frozenset)) else fields_of(value)
