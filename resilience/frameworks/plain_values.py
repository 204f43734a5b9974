"""Values of an object that another process can be given: numbers, text, tensors, lists of these."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 3


def read_values(owner: object, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return a copy of an object's plain attributes, but for those of `without`."""
    found = {}
    for name, value in vars(owner).items():
        if name not in without and _is_plain(value, _DEPTH):
            found[name] = _copy(value)
    return found


def write_values(owner: object, values: Mapping[str, Any]) -> None:
    """Put back what `read_values` returned; mappings stay the objects that they are."""
    own = vars(owner)
    for name, value in values.items():
        own[name] = _replace(own.get(name), value)


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad and value.device.type == "cpu"
    if depth and isinstance(value, Mapping):
        return all(type(k) in _PLAIN and _is_plain(v, depth - 1) for k, v in value.items())
    if depth and type(value) in (list, tuple):
        return all(_is_plain(each, depth - 1) for each in value)
    return type(value) in _PLAIN


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    return type(value)(map(_copy, value)) if isinstance(value, (list, tuple)) else value


def _replace(own: Any, value: Any) -> Any:
    if isinstance(own, MutableMapping) and isinstance(value, Mapping):
        before = dict(own)
        own.clear()
        own.update({key: _replace(before.get(key), each) for key, each in value.items()})
        return own
    return _copy(value)
