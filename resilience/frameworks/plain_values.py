"""Values of an object that another process can be given: numbers, text, arrays, lists of these."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 3
_ITEM_BYTES_MAX = 8
"""Bytes of an array's number; torch has no longer ones."""
_ARRAY, _NUMBER, _DEQUE, _SET, _DICT = (
    f"\0{each}" for each in ("array", "number", "deque", "set", "dict")
)
"""First parts of the tuples in which other kinds travel."""
_IN_JSON = ("tensor", "tuple", "pairs")
_DICTS: dict[str, type] = {"OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str, Any] = {each.__name__: each for each in (int, float, str, list, dict, set)}
"""Factories of a defaultdict's values, by name."""


class KeptValues:
    """The plain attributes of one object of a program, for a step that is run again.

    Each object of a step's begin comes back itself, with the contents that it had: attributes that
    share one go on sharing it. A process that joins takes over copies of the attributes that have
    changed on another rank since this was made: others may be a rank's own.
    """

    _MOMENTS_MAX = 8

    def __init__(self, owner: object, *, without: frozenset[str] = frozenset()) -> None:
        self._owner, self._without = owner, without
        self._at_first = read_values(owner, without=without)
        self._changed: set[str] = set()
        self._objects: dict[int, dict[str, Any]] = {}
        """The objects that had the values of a moment."""
        self._num_moments = 0

    def follow(self, owner: object) -> None:
        """Keep the attributes of another object, in the place of the one before."""
        self._owner = owner

    def read(self) -> dict[str, Any]:
        """Return all plain attributes, as numbers, text, tensors, and lists and dicts of these."""
        values = read_values(self._owner, without=self._without)
        self._note_changed(values)
        own = vars(self._owner)
        self._num_moments += 1
        self._objects[self._num_moments] = {name: _refer(own[name]) for name in values}
        self._objects.pop(self._num_moments - self._MOMENTS_MAX, None)
        return {"moment": self._num_moments, "values": values, **self._names()}

    def read_changed(self) -> dict[str, Any]:
        """Return what a process that joins needs of them."""
        values = read_values(self._owner, without=self._without)
        self._note_changed(values)
        kept = {name: each for name, each in values.items() if name in self._changed}
        return {"values": kept, **self._names()}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Put back what `read` of this object has returned; what was made since is removed."""
        own, values = vars(self._owner), found["values"]
        now = read_values(self._owner, without=self._without.union(found["names"]))
        for name in now.keys() - values.keys():
            del own[name]
        objects = self._objects.get(found["moment"])
        if objects is None:
            write_values(self._owner, values)
        else:
            own.update({name: _put_back(objects[name], each) for name, each in values.items()})

    def take_over(self, found: Mapping[str, Any]) -> None:
        """Take what has changed over from `read` or `read_changed` of another rank's object."""
        own, values = vars(self._owner), found["values"]
        self._changed.update(found["changed"])
        write_values(
            self._owner, {name: values[name] for name in found["changed"] if name in values}
        )
        for name in set(found["changed"]).difference(found["names"]):
            own.pop(name, None)

    def _note_changed(self, values: Mapping[str, Any]) -> None:
        before = self._at_first
        self._changed |= {
            name
            for name, each in values.items()
            if name not in before or not _is_same(each, before[name])
        }
        self._changed |= before.keys() - vars(self._owner).keys()

    def _names(self) -> dict[str, list[str]]:
        return {"names": list(vars(self._owner)), "changed": sorted(self._changed)}


def read_values(owner: object, *, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return a copy of an object's plain attributes, but for those of `without`.

    It has numbers, text, tensors, and lists, tuples and dicts of these alone.
    """
    found = {}
    for name, value in vars(owner).items():
        if name not in without and is_plain(value):
            found[name] = _copy(value)
    return found


def write_values(owner: object, values: Mapping[str, Any]) -> None:
    """Put back what `read_values` returned, where it differs; mappings stay what they are."""
    own = vars(owner)
    for name, value in values.items():
        if name not in own or not _has(own[name], value):
            own[name] = _replace(own.get(name), value)


def name_by_class(objects: Iterable[object]) -> dict[str, Any]:
    """Return objects by class and number, since ranks may have others besides."""
    found: dict[str, Any] = {}
    for each in objects:
        name = type(each).__name__
        found[f"{name}/{sum(key.startswith(f'{name}/') for key in found)}"] = each
    return found


def as_json(value: Any) -> Any:
    """Return values that `read_values` has returned as JSON has them: `from_json` is their hook.

    JSON has neither tensors nor tuples, and its keys are text.
    """
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        if all(type(key) is str and key not in _IN_JSON for key in value):
            return {key: as_json(each) for key, each in value.items()}
        return {"pairs": [[key, as_json(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [as_json(each) for each in value]}
    return [as_json(each) for each in value] if isinstance(value, list) else value


def from_json(found: dict[str, Any]) -> Any:
    """Return the value of a JSON object that `as_json` has written."""
    if "tensor" in found:
        return torch.tensor(found["tensor"], dtype=getattr(torch, found["dtype"]))
    if "tuple" in found:
        return tuple(found["tuple"])
    return dict(found["pairs"]) if "pairs" in found else found


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether a value is of these, to a depth."""
    if isinstance(value, Tensor):
        is_dense = value.layout == torch.strided and not value.is_quantized
        return is_dense and not value.requires_grad and value.device.type == "cpu"
    if depth and type(value) in (dict, defaultdict, *_DICTS.values()):
        return all(type(k) in _PLAIN and is_plain(v, depth - 1) for k, v in value.items())
    if depth and type(value) in (list, tuple, deque):
        return all(is_plain(each, depth - 1) for each in value)
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biuf" and value.dtype.itemsize <= _ITEM_BYTES_MAX
    if type(value) is set:
        return all(type(each) in _PLAIN for each in value)
    return type(value) in _PLAIN


def _has(own: Any, value: Any) -> bool:
    return is_plain(own) and _is_same(_copy(own), value)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two copies have the same bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and torch.equal(_bits(one), _bits(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one.hex() == other.hex()
    return type(one) is type(other) and bool(one == other)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        copied = {key: _copy(each) for key, each in value.items()}
        factory = getattr(value, "default_factory", None)
        name, made_by = type(value).__name__, getattr(factory, "__name__", "")
        is_known = _DICTS.get(name) is type(value) or _FACTORIES.get(made_by, copied) is factory
        return (_DICT, name, made_by, copied) if is_known else copied
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
        case (str(kind), str(name), str(made_by), dict(found)) if kind == _DICT:
            held = {key: _unpack(each) for key, each in found.items()}
            return _DICTS[name](held) if name in _DICTS else defaultdict(_FACTORIES[made_by], held)
        case list() | tuple():
            return type(value)(map(_unpack, value))
        case dict():
            return {key: _unpack(each) for key, each in value.items()}
    return _copy(value)


def _replace(own: Any, value: Any) -> Any:
    parts = value[-1] if isinstance(value, tuple) and value[:1] == (_DICT,) else value
    if isinstance(own, MutableMapping) and isinstance(parts, Mapping):
        before = dict(own)
        own.clear()
        own.update({key: _replace(before.get(key), each) for key, each in parts.items()})
        return own
    return _unpack(value)


def _refer(value: Any) -> tuple[Any, Any]:
    """Return an object with those that it holds, as they are."""
    if isinstance(value, Mapping):
        return value, {key: _refer(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return value, [_refer(each) for each in value]
    return value, None


def _put_back(referred: tuple[Any, Any], value: Any) -> Any:
    """Return an object with the contents that it and those it holds had then."""
    own, parts = referred
    held: Any = None
    if isinstance(own, Mapping):
        copied = value[-1] if isinstance(value, tuple) else value
        held = {key: _put_back(parts[key], each) for key, each in copied.items()}
    elif isinstance(own, (list, tuple, deque)):
        copied = value[-1] if isinstance(own, deque) else value
        held = [_put_back(part, each) for part, each in zip(parts, copied, strict=True)]
    if isinstance(own, tuple):
        return (
            own if all(one is other for one, other in zip(own, held, strict=True)) else tuple(held)
        )
    if isinstance(own, MutableMapping):
        own.clear()
        own.update(held)
    elif isinstance(own, list):
        own[:] = held
    elif isinstance(own, deque):
        own.clear()
        own.extend(held)
    elif not _has(own, value):
        return _write(own, _unpack(value))
    return own


def _write(own: Any, value: Any) -> Any:
    """Write other contents into an object; or return them, where it takes none."""
    if isinstance(own, Tensor):
        is_fixed = own.is_inference() or own.requires_grad or not own.is_contiguous()
        return value if is_fixed or own.shape != value.shape else own.copy_(value)
    if isinstance(own, np.ndarray) and own.flags.writeable and own.shape == value.shape:
        own[...] = value
        return own
    if isinstance(own, set):
        own.clear()
        own.update(value)
        return own
    return value
