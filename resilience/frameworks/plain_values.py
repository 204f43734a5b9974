"""Values of an object that another process can be given: numbers, text, arrays, lists of these."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 3
_ITEM_BYTES_MAX = 8
"""Bytes of an array's number; torch has no longer ones."""
_ARRAY, _NUMBER, _DEQUE, _SET = (f"\0{each}" for each in ("array", "number", "deque", "set"))
"""First parts of the tuples in which other kinds travel."""


def read_values(owner: object, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return a copy of an object's plain attributes, but for those of `without`.

    It has numbers, text, tensors, and lists, tuples and dicts of these alone.
    """
    found = {}
    for name, value in vars(owner).items():
        if name not in without and is_plain(value):
            found[name] = _copy(value)
    return found


def changed_values(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of `read_values` differs from an earlier one's."""
    return {
        key: each
        for key, each in now.items()
        if key not in before or not _is_same(each, before[key])
    }


def restore_values(owner: object, values: Mapping[str, Any], *, kept: frozenset[str]) -> None:
    """Put back plain attributes, and remove those that were made since, but for `kept`."""
    for name in read_values(owner, without=kept).keys() - values.keys():
        delattr(owner, name)
    write_values(owner, values)


def write_values(owner: object, values: Mapping[str, Any]) -> None:
    """Put back what `read_values` returned; mappings stay the objects that they are."""
    own = vars(owner)
    for name, value in values.items():
        own[name] = _replace(own.get(name), value)


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether a value is of these, to a depth."""
    if isinstance(value, Tensor):
        return not value.requires_grad and value.device.type == "cpu"
    if depth and isinstance(value, Mapping):
        return all(type(k) in _PLAIN and is_plain(v, depth - 1) for k, v in value.items())
    if depth and type(value) in (list, tuple, deque):
        return all(is_plain(each, depth - 1) for each in value)
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biuf" and value.dtype.itemsize <= _ITEM_BYTES_MAX
    if type(value) is set:
        return all(type(each) in _PLAIN for each in value)
    return type(value) in _PLAIN


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        kind = _ARRAY if isinstance(value, np.ndarray) else _NUMBER
        return kind, torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if isinstance(value, deque):
        return _DEQUE, value.maxlen, [_copy(each) for each in value]
    if isinstance(value, set):
        return _SET, sorted(value, key=repr)
    return type(value)(map(_copy, value)) if isinstance(value, (list, tuple)) else value


def _unpack(value: Any) -> Any:
    """Return a copy of what `_copy` has returned, in the kinds that it came in."""
    match value:
        case (str(kind), Tensor() as tensor) if kind in (_ARRAY, _NUMBER):
            array = tensor.clone().numpy()
            return array if kind == _ARRAY else array[()]
        case (str(kind), length, list(parts)) if kind == _DEQUE:
            return deque(map(_unpack, parts), length)
        case (str(kind), list(parts)) if kind == _SET:
            return set(parts)
        case list() | tuple():
            return type(value)(map(_unpack, value))
        case dict():
            return {key: _unpack(each) for key, each in value.items()}
    return _copy(value)


def _replace(own: Any, value: Any) -> Any:
    if isinstance(own, MutableMapping) and isinstance(value, Mapping):
        before = dict(own)
        own.clear()
        own.update({key: _replace(before.get(key), each) for key, each in value.items()})
        return own
    return _unpack(value)
