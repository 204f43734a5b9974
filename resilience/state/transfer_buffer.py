"""Shared memory of one node, through which ranks hand their state to each other.

The memory has no name: it lives as long as a process has it mapped or holds
its descriptor, so that no death leaves anything behind. One process of the node
creates it, the others inherit the descriptor.
"""

from __future__ import annotations

import mmap
import os

SLOT_BYTES = 32 << 20
"""What one slot should have: the ring of one transfer, small enough for the cores' shared cache."""


def create_transfer_buffer(num_slots: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return a descriptor of `num_slots * slot_bytes` of zeroed memory that is really there.

    The descriptor is closed on exec; the caller owns it. Raises OSError where
    the node lacks the memory, which would else kill a process that writes to it,
    and ValueError for a size that is no whole number of pages.
    """
    size_bytes = num_slots * slot_bytes
    if num_slots < 1 or slot_bytes < 1:
        raise ValueError(
            f"a transfer buffer of {num_slots} slots of {slot_bytes} bytes holds nothing"
        )
    if slot_bytes % mmap.PAGESIZE:
        raise ValueError(f"slots of {slot_bytes} bytes are no whole pages of {mmap.PAGESIZE}")
    descriptor = os.memfd_create("resilience-transfer")
    try:
        os.ftruncate(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class TransferBuffer:
    """One process's map of the buffer: `num_slots` slots of `slot_bytes`, one a local rank.

    Leaves `descriptor` to its owner. Not synchronised: a slot is written by the
    source of a transfer and read by its target, who agree by messages.
    Raises ValueError where the memory behind the descriptor is smaller.
    """

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int = SLOT_BYTES) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._memory = memoryview(mmap.mmap(descriptor, num_slots * slot_bytes))

    def touch(self) -> None:
        """Make this process's page-table entries now, not within a transfer; writes nothing."""
        # Reading is enough: a page of a shared map is entered with the right to write.
        for offset in range(0, len(self._memory), mmap.PAGESIZE):
            self._memory[offset]

    def slot(self, number: int) -> memoryview:
        """Return the memory of one slot, `slot_bytes` long and writable."""
        if not 0 <= number < self.num_slots:
            raise ValueError(f"no slot {number}: the transfer buffer has {self.num_slots}")
        begin = number * self.slot_bytes
        return self._memory[begin : begin + self.slot_bytes]
