"""The states of one node's ranks in shared memory, where any rank of the node can read them.

Each local rank has a place: memory without a name that outlives the process and
goes with the last holder of its descriptor. A rank's tensors live in its place,
side by side in the order of the view, so that equal layouts have equal bytes.

Not synchronised: a place is written by its rank alone, and read by others only
while that rank waits for them. Places grow and never shrink under a reader.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resilience.state.view import Movable, NamedTensor, StateView

ALIGNMENT_BYTES = 64
"""Where a tensor may begin: as torch's own memory does, so that no kernel takes another road."""

_PIECE_BYTES = 64 << 20
"""How much memory is taken at a time, while the tensors that move give theirs back."""

_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""

Bytes = NDArray[np.uint8]


class SharedState:
    """One process's maps of the places of its node, `files[n]` being that of local rank n.

    Leaves the descriptors to their owner. Used by one thread.
    """

    def __init__(self, files: Sequence[int]) -> None:
        self.local_rank: int | None = None
        """Whose place this process's tensors live in; None before one is adopted."""
        self._files = list(files)
        self._maps: dict[int, _Map] = {}
        self._num_bytes = 0
        self._left: list[Tensor] = []

    def adopt(self, view: StateView, local_rank: int, *, is_overwritten: bool = False) -> bool:
        """Move the tensors of a view into a place; returns whether they all live there now.

        The trainer's tensors stay the same objects, with other memory. Call it when
        they exist and before a forward, and again when they are others or larger. Memory
        that a tensor had outside the view's sight is not followed: views made before,
        a graph. What lived in the place before is overwritten. A child that is forked
        afterwards shares the memory: what it writes to a parameter is written here.

        `is_overwritten` is for a replaced process, which receives all of its state
        next: the tensors take the values that the place has, those of the dead
        process or zeros, and no page is made that exists. `prepare` has to follow the
        repair: only then goes the memory that they had. Else they keep their values.

        False for tensors that cannot be moved (DTensor, device, gaps, shared storage)
        and where the node lacks the memory; the tensors are then where they were, or
        in ordinary memory, with the values that they had.
        """
        tensors = view.owners() if isinstance(view, Movable) else None
        if tensors is None or not _are_movable(tensors):
            return False
        offsets, num_bytes = _place_tensors(tensors)
        if self.local_rank == local_rank and self._holds(tensors):
            return True
        if self.local_rank is not None and not is_overwritten:
            # They may lie where others are about to be written.
            _move_out(tensors)
        self.local_rank = None
        if not self._move_in(tensors, offsets, num_bytes, local_rank, is_copied=not is_overwritten):
            return False
        self.local_rank, self._num_bytes = local_rank, num_bytes
        if not is_overwritten:
            self._let_go()
        return True

    def reserve(self, view: StateView) -> None:
        """Give every place the memory that tensors like these need, then `prepare`.

        For a process that has no rank yet: a page that is made now is not made while a run waits
        for the rank. A place that has its memory is left alone. Does nothing for tensors that
        cannot be moved; where the node lacks the memory, `adopt` will find out.
        """
        tensors = view.owners() if isinstance(view, Movable) else None
        if tensors is None or not _are_movable(tensors):
            return
        size = _whole_pages(_place_tensors(tensors)[1])
        # Each process begins elsewhere: those that start together share the work.
        first = os.getpid() % len(self._files)
        with suppress(OSError):
            for file in self._files[first:] + self._files[:first]:
                if os.fstat(file).st_size < size:
                    os.ftruncate(file, size)
                _allocate(file, _count_allocated(file), size, size)
            self.prepare()

    def prepare(self) -> None:
        """Map all places that have memory, and make this process's page-table entries now.

        For a warm spare, whose own place may be any of them, and for a rank after all
        have adopted theirs or after a recovery. Costs some 0.1 s a GiB of places that
        are new or have grown; one that lacks memory is left alone. A process that has
        a place can write nowhere else afterwards. Raises OSError where nothing more
        can be mapped.
        """
        is_spare = self.local_rank is None
        try:
            for number, file in enumerate(self._files):
                size = os.fstat(file).st_size
                known = self._maps.get(number)
                if known and size <= known.num_bytes:
                    if number != self.local_rank:
                        known.protect(is_writable=is_spare)
                elif size and _count_allocated(file) == size:
                    # Not where there is a hole: to map it would fill it.
                    self._maps[number] = _Map(file, size, is_writable=is_spare, is_populated=True)
        finally:
            if self._left:
                self._let_go()

    def holds(self, tensors: Sequence[NamedTensor]) -> bool:
        """Return whether these are the tensors of this process's place, all of them in it."""
        return self._holds([each.tensor for each in tensors])

    def own_bytes(self) -> Bytes:
        """Return the memory of this process's tensors, what lies between them included."""
        assert self.local_rank is not None, "no place was adopted"
        return self._maps[self.local_rank].memory[: self._num_bytes]

    def open_place(self, local_rank: int, num_bytes: int) -> Bytes:
        """Return the first bytes of a place, to be read only.

        Raises OSError or ValueError for a place that is smaller, or cannot be mapped.
        """
        known = self._maps.get(local_rank)
        if known is None or known.num_bytes < num_bytes:
            size = os.fstat(self._files[local_rank]).st_size
            if size < num_bytes:
                raise ValueError(f"place {local_rank} has {size} bytes, not {num_bytes}")
            known = _Map(self._files[local_rank], size, is_writable=False, is_populated=True)
            self._maps[local_rank] = known
        part = known.memory[:num_bytes]
        part.flags.writeable = False
        return part

    def _move_in(
        self,
        tensors: Sequence[Tensor],
        offsets: Sequence[int],
        num_bytes: int,
        local_rank: int,
        *,
        is_copied: bool,
    ) -> bool:
        """Give the tensors memory of a place; False, with nothing changed, where there is none."""
        file = self._files[local_rank]
        moved: list[Tensor] = []
        try:
            own = self._open_own(local_rank, num_bytes, is_populated=not is_copied)
            allocated = _count_allocated(file)
            for tensor, offset in zip(tensors, offsets, strict=True):
                if tensor.numel():
                    allocated = _allocate(file, allocated, offset + tensor.nbytes, own.num_bytes)
                    memory = own.tensor_like(tensor, offset)
                    if is_copied:
                        memory.copy_(tensor.detach())
                        moved.append(tensor)
                    else:
                        self._left.append(tensor.data)
                    # The only way to give all holders of this very object other memory.
                    tensor.data = memory
        except OSError:
            _move_out(moved)
            self._maps.pop(local_rank, None)
            _empty(file)
            return False
        return True

    def _open_own(self, local_rank: int, num_bytes: int, *, is_populated: bool) -> _Map:
        """Return a writable map of a place that is large enough, with all its memory if asked."""
        file = self._files[local_rank]
        size = _whole_pages(num_bytes)
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        if is_populated:
            _allocate(file, _count_allocated(file), size, size)
        own = self._maps.get(local_rank)
        if own is None or own.num_bytes < size:
            own = _Map(file, size, is_writable=True, is_populated=is_populated)
            self._maps[local_rank] = own
        own.protect(is_writable=True)
        return own

    def _let_go(self) -> None:
        """Hand back what the tensors had; the C library may keep it for later."""
        self._left.clear()
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def _holds(self, tensors: Sequence[Tensor]) -> bool:
        if self.local_rank is None:
            return False
        offsets, num_bytes = _place_tensors(tensors)
        begin = self._maps[self.local_rank].address
        return num_bytes == self._num_bytes and all(
            not each.numel() or (each.data_ptr() == begin + offset and each.is_contiguous())
            for each, offset in zip(tensors, offsets, strict=True)
        )


class _Map:
    """A place in this process's memory."""

    def __init__(self, file: int, size: int, *, is_writable: bool, is_populated: bool) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if is_populated else 0)
        self._map = mmap.mmap(file, size, flags=flags)
        self._is_writable = True
        self.num_bytes = size
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = self.memory.ctypes.data
        self.protect(is_writable=is_writable)

    def protect(self, *, is_writable: bool) -> None:
        """Let this process write here or not; page-table entries stay.

        Still it takes some 10 ms a GiB, which is why a spare may write before it has a place.
        """
        if is_writable == self._is_writable:
            return
        right = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        begin, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self.num_bytes)
        _call_libc("mprotect", begin, size, right)
        self._is_writable = is_writable

    def tensor_like(self, tensor: Tensor, offset: int) -> Tensor:
        """Return memory of the place as a tensor, in a storage of its own."""
        flat = torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return flat.view(tensor.shape)


def _allocate(file: int, begin: int, end: int, size: int) -> int:
    """Allocate from `begin` at least to `end`, in pieces; returns how far it is.

    Only what has no memory yet: going over pages that exist costs more than making them.
    """
    while begin < end:
        piece = min(_PIECE_BYTES, size - begin)
        os.posix_fallocate(file, begin, piece)
        begin += piece
    return begin


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _empty(file: int) -> None:
    """Give back a file's memory, but not its size: a spare may have mapped it at any moment."""
    size = ctypes.c_int64(os.fstat(file).st_size)
    if size.value:
        _call_libc("fallocate", file, _PUNCH_HOLE, ctypes.c_int64(0), size)


def _call_libc(name: str, *arguments: Any) -> None:
    """Call a function of the C library that Python has not; raises OSError where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _count_allocated(file: int) -> int:
    """Return how far a file has memory without a hole."""
    status = os.fstat(file)
    if status.st_blocks * 512 >= status.st_size:
        return status.st_size
    return os.lseek(file, 0, os.SEEK_HOLE)


def _place_tensors(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins, and where the last one ends."""
    offsets, end = [], 0
    for each in tensors:
        begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(begin)
        end = begin + each.nbytes
    return offsets, end


def _are_movable(tensors: Sequence[Tensor]) -> bool:
    """Return whether each is the only user of a storage that is all its own."""
    full = [each for each in tensors if each.numel()]
    return (
        bool(full)
        and all(each.device.type == "cpu" and each.is_contiguous() for each in full)
        and all(each.untyped_storage().nbytes() == each.nbytes for each in full)
        and len({each.data_ptr() for each in full}) == len(full)
    )


def _move_out(tensors: Sequence[Tensor]) -> None:
    """Give tensors ordinary memory again."""
    for each in tensors:
        each.data = each.data.clone()
