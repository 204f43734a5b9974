"""Tensors as one stream of bytes, hashed where they are copied.

The hash is over the tensors' own memory, read before the copy leaves it or
after the copy has reached it: whatever changes between two tensors is seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from resilience.state.digest import flat_bytes
from resilience.state.view import NamedTensor

BLOCK_BYTES = 512 << 10
"""How much is copied, then hashed: it has to stay in a core's own cache."""

Bytes = NDArray[np.uint8]


class Stream:
    """Tensors as one sequence of bytes, read or written once from begin to end.

    A tensor that is not contiguous goes through a copy of its own; what is on a
    device is copied in pieces through the caller's memory.
    """

    def __init__(self, tensors: Sequence[NamedTensor], *, is_read: bool) -> None:
        self._tensors = iter([each.tensor for each in tensors if each.tensor.numel()])
        self._is_read = is_read
        self._memory: _DeviceMemory | None = None
        self._offset = 0

    def pass_chunk(self, chunk: Bytes) -> int:
        """Fill the chunk with the next bytes, or set the next bytes to it; returns their xxh3_64.

        The caller asks for no more bytes than there are.
        """
        checksum = xxhash.xxh3_64()
        done = 0
        while done < len(chunk):
            memory = self._memory
            if memory is None:
                memory, self._offset = _open(next(self._tensors), is_read=self._is_read), 0
                self._memory = memory
            size = min(len(chunk) - done, memory.num_bytes - self._offset, BLOCK_BYTES)
            block = chunk[done : done + size]
            hashed = (memory.read if self._is_read else memory.write)(self._offset, block)
            checksum.update(hashed.data)
            done, self._offset = done + size, self._offset + size
            if self._offset == memory.num_bytes:
                memory.close()
                self._memory = None
        return checksum.intdigest()


class _DeviceMemory:
    """A tensor's bytes on a device; blocks are hashed on the host."""

    def __init__(self, flat: Tensor, copied_to: Tensor | None = None) -> None:
        self.num_bytes = flat.numel()
        self._flat = flat
        self._copied_to = copied_to

    def read(self, offset: int, block: Bytes) -> Bytes:
        """Copy into the block; returns the block."""
        torch.from_numpy(block).copy_(self._flat[offset : offset + len(block)])
        return block

    def write(self, offset: int, block: Bytes) -> Bytes:
        """Copy from the block; returns the block."""
        self._flat[offset : offset + len(block)].copy_(_as_tensor(block))
        return block

    def close(self) -> None:
        """Bring into the tensor what was written beside it."""
        if self._copied_to is not None:
            target = self._copied_to
            target.copy_(self._flat.view(target.dtype).view(target.shape))


class _HostMemory(_DeviceMemory):
    """A tensor's bytes that can be read and written where they are, or in its copy."""

    def read(self, offset: int, block: Bytes) -> Bytes:
        """Copy into the block; returns the memory that it came from."""
        part: Bytes = self._flat[offset : offset + len(block)].numpy()
        block[:] = part
        return part

    def write(self, offset: int, block: Bytes) -> Bytes:
        """Copy from the block; returns the memory that it went to."""
        part: Bytes = self._flat[offset : offset + len(block)].numpy()
        part[:] = block
        return part


def _as_tensor(block: Bytes) -> Tensor:
    """Return a block that is only read; by `from_numpy` torch warns of memory that is read-only."""
    memory = (ctypes.c_uint8 * len(block)).from_address(block.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _open(tensor: Tensor, *, is_read: bool) -> _DeviceMemory:
    kind = _HostMemory if tensor.device.type == "cpu" else _DeviceMemory
    if tensor.is_contiguous():
        return kind(flat_bytes(tensor))
    if is_read:
        return kind(flat_bytes(tensor.contiguous()))
    return kind(flat_bytes(tensor.new_empty(tensor.shape)), copied_to=tensor)
