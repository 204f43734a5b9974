"""What AWS's library stores, read without running any of it.

Its metadata is a pickle of DCP's `Metadata`. A pickle is a program; the standard library takes
it apart into instructions, and a machine that knows the few instructions and classes such
metadata is made of runs them. It calls nothing by name: where the program asks for a call, one
of four conversions of plain data is made here. All else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from resilience.tiered.dcp.plain_items import load_plain
from resilience.tiered.errors import FormatError

METADATA_BYTES_MAX = 64 << 20
"""A metadata of half a million items; what is made of it takes some 30 times its size."""

_DCP = "torch.distributed.checkpoint.metadata"
_AWS = "amzn_sagemaker_checkpointing.checkpointing.filesystem"
_WHOLE_MAX = 1 << 63


@dataclass
class StorageInfo:
    """Where an item lies: in the blob of which rank, and which bytes of it."""

    rank: int
    offset: int
    length: int


def decode_metadata(blob: bytes, *, bytes_max: int = METADATA_BYTES_MAX) -> Metadata:
    """Read a metadata; its `storage_data` is a dict of MetadataIndex and StorageInfo.

    Raises FormatError for what is longer than `bytes_max` bytes, no such pickle, or asks
    for anything but the classes of such metadata.
    """
    if len(blob) > bytes_max:
        raise FormatError(f"a metadata of {len(blob)} bytes is longer than {bytes_max}")
    try:
        return _Checker().metadata(_Machine().run(blob))
    except _REFUSED as error:
        raise FormatError(f"no metadata of AWS's library: {error}") from error


def decode_tensor(item: bytes, *, checks: bool = False) -> Tensor:
    """Read a tensor as `torch.save` has written it; FormatError for anything else.

    `checks` compares it with the CRC-32 that it brings along, which torch does not.
    """
    tensor = load_plain(item, checks=checks)
    if not isinstance(tensor, Tensor) or not _is_plain(tensor):
        raise FormatError(f"no plain tensor of AWS's library: a {type(tensor).__name__}")
    return tensor


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )


_REFUSED = (ValueError, KeyError, IndexError, TypeError, AttributeError)

_CLASSES: Mapping[tuple[str, str], type] = {
    **{
        (_DCP, each.__name__): each
        for each in (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )
    },
    # The module has moved between the library's versions.
    (f"{_AWS}.storage_info", "_SageMakerStorageInfo"): StorageInfo,
    (f"{_AWS}.filesystem", "_SageMakerStorageInfo"): StorageInfo,
}
_KINDS = frozenset(_CLASSES.values())
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}


def _make_size(numbers: Any) -> torch.Size:
    if type(numbers) is not tuple or not all(map(_is_whole, numbers)):
        raise ValueError("a size that is none")
    return torch.Size(numbers)


def _make_dict() -> dict[Any, Any]:
    return {}


_CALLS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _make_size,
    ("collections", "OrderedDict"): _make_dict,
    # Of properties that DCP no longer uses.
    ("torch.serialization", "_get_layout"): lambda name: name,
    (_DCP, "_MEM_FORMAT_ENCODING"): lambda number: number,
}


@dataclass(slots=True, frozen=True, eq=False)
class _Call:
    """A conversion that the program may ask for."""

    make: Callable[..., Any]


_MARK = object()
"""Where a group of values on the stack begins."""


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _WHOLE_MAX


class _Machine:
    """Runs one pickle of protocol 4 or 5; each method is an instruction, or a part of some."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def run(self, blob: bytes) -> Any:
        """Return what the program makes."""
        for instruction, argument, at in pickletools.genops(blob):
            step = _STEPS.get(instruction.name)
            if step is None:
                code = instruction.code.encode("latin-1")
                raise ValueError(f"instruction {code!r} at byte {at}")
            step(self, argument)
        (value,) = self._stack
        return value

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def memoize(self, _: None) -> None:
        self._memo.append(self._stack[-1])

    def recall(self, number: int) -> None:
        self.push(self._memo[number])

    def pop_group(self) -> list[Any]:
        """Return what lies above the newest mark."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a group without a beginning")
        group = self._stack[at + 1 :]
        del self._stack[at:]
        return group

    def protocol(self, number: int) -> None:
        if number not in (4, 5):
            raise ValueError(f"a pickle of protocol {number}; 4 and 5 are known")

    def tuple_of(self, size: int) -> None:
        values = [self._stack.pop() for _ in range(size)]
        self.push(tuple(reversed(values)))

    def name(self, _: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name that is no text")
        key = (module, name)
        if key in _CLASSES:
            self.push(_CLASSES[key])
        elif key in _CALLS:
            self.push(_Call(_CALLS[key]))
        elif module == "torch" and name in _DTYPES:
            self.push(_DTYPES[name])
        else:
            raise ValueError(f"it asks for {module:.80}.{name:.80}")

    def new(self, _: None) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        if type(kind) is not type or kind not in _KINDS or arguments != ():
            raise ValueError("an object that is none")
        self.push(object.__new__(kind))

    def call(self, _: None) -> None:
        arguments, call = self._stack.pop(), self._stack.pop()
        if type(call) is not _Call or type(arguments) is not tuple:
            raise ValueError("a call that is none")
        self.push(call.make(*arguments))

    def build(self, _: None) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) not in _KINDS or vars(target):
            raise ValueError("a state of what has none, or has it already")
        _fill(target, state)

    def append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("an append to what is no list")
        self._stack[-1].extend(values)

    def set_one(self, _: None) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self.set([key, value])

    def set(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise ValueError("an entry of what is no dict")
        for key, value in zip(values[::2], values[1::2], strict=True):
            # The hash of nested tuples may take for ever.
            if type(key) not in (str, MetadataIndex):
                raise ValueError(f"a key of type {type(key).__name__}")
            target[key] = value


def _fill(target: Any, state: Any) -> None:
    """Give an object its state; what is in it is checked at the end."""
    if type(target) is TensorProperties:
        dtype, _, requires_grad, _, _ = state
        state = {"dtype": dtype, "requires_grad": requires_grad is True}
    if type(state) is not dict:
        raise ValueError("a state that is none")
    names = target.__dataclass_fields__
    if unknown := [name for name in state if name not in names]:
        raise ValueError(f"a {type(target).__name__} with {unknown[0]!r:.80}")
    vars(target).update(state)
    if type(target) is MetadataIndex:
        # At once: the next instruction may use it as a key.
        _check(type(target.fqn) is str, "the name of an item")
        _check(target.offset is None or type(target.offset) is torch.Size, "an offset")
        _check(target.index is None or _is_whole(target.index), "an index")


_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    "FRAME": lambda _machine, _: None,
    "MARK": lambda machine, _: machine.push(_MARK),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "NONE": _Machine.push,
    "NEWTRUE": lambda machine, _: machine.push(value=True),
    "NEWFALSE": lambda machine, _: machine.push(value=False),
    "BININT1": _Machine.push,
    "BININT2": _Machine.push,
    "BININT": _Machine.push,
    "LONG1": _Machine.push,
    "SHORT_BINUNICODE": _Machine.push,
    "BINUNICODE": _Machine.push,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_group())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "STACK_GLOBAL": _Machine.name,
    "NEWOBJ": _Machine.new,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_group()),
    "SETITEM": _Machine.set_one,
    "SETITEMS": lambda machine, _: machine.set(machine.pop_group()),
    "STOP": lambda _machine, _: None,
}
"""By the names that `pickletools` gives them; each gets what stands behind the instruction."""


class _Checker:
    """Looks at all that a program has made; at what it refers to many times, once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def metadata(self, made: Any) -> Metadata:
        """Return the metadata; raises ValueError where it is not made of what it should be."""
        _check(type(made) is Metadata, "what is made")
        for name, each in _entries(made.state_dict_metadata):
            _check(type(name) is str, "a name")
            self._tensor(each)
        for index, each in _entries(made.storage_data):
            _check(type(index) is MetadataIndex and type(each) is StorageInfo, "a place")
            _check(all(map(_is_whole, (each.rank, each.offset, each.length))), "a place")
        if made.planner_data is not None:
            for name, each in _entries(made.planner_data):
                _check(type(name) is str, "a path")
                self._path(each)
        return Metadata(
            state_dict_metadata=made.state_dict_metadata,
            planner_data=made.planner_data,
            storage_data=made.storage_data,
        )

    def _tensor(self, each: Any) -> None:
        if type(each) is BytesStorageMetadata or self._knows(each):
            return
        _check(type(each) is TensorStorageMetadata, "a tensor")
        _check(type(each.properties) is TensorProperties, "a tensor's properties")
        _check(type(each.properties.dtype) is torch.dtype, "a tensor's type")
        _check(type(each.size) is torch.Size and type(each.chunks) is list, "a tensor's size")
        if not self._knows(each.chunks):
            for chunk in each.chunks:
                _check(type(chunk) is ChunkStorageMetadata, "a chunk")
                sizes = (chunk.offsets, chunk.sizes)
                _check(all(type(size) is torch.Size for size in sizes), "a chunk's size")

    def _path(self, each: Any) -> None:
        if not self._knows(each):
            _check(type(each) is tuple, "a path")
            _check(all(type(part) in (str, int) for part in each), "a path")

    def _knows(self, each: Any) -> bool:
        if id(each) in self._seen:
            return True
        self._seen.add(id(each))
        return False


def _entries(value: Any) -> list[tuple[Any, Any]]:
    _check(type(value) is dict, "a table")
    return list(value.items())


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"{what} is not what it should be")
