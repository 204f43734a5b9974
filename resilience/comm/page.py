"""A small page of shared memory in which a node's workers show that they live and where they are.

Each worker has a slot of its own, in which it writes the time of its last
heartbeat, by a thread, so that a stopped process is seen; and its progress, by
the training thread, so that a stuck one is. The agent writes there that it has
asked the worker to end. Nobody waits for anybody here, and no lock is taken:
each field is one aligned word.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

PAGE_NAME = "resilience-page"
SLOT_BYTES = 64
_FIELD_BYTES = 8
# Native: with an explicit byte order Python writes byte by byte, and a reader sees half a word.
_FIELDS = struct.Struct("@dQd")
_BEAT, _WORD, _PROGRESS, _ASKED = range(4)
"""Numbers of the fields in a slot, eight bytes each."""
_STEP_SHIFT = 24


class Activity(IntEnum):
    """Where in a step a training thread is; NOWHERE while no deadline applies to it.

    WAITING for the repair of other ranks, who are under one, wherever they are.
    """

    NOWHERE = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    REDUCED = 4
    GATE = 5
    UPDATE = 6
    RECOVERY = 7
    WAITING = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What a worker's slot shows."""

    beat_s: float
    """time.monotonic() of the last heartbeat; 0 where there was none."""
    step: int
    activity: Activity
    micro_batch: int
    progress_s: float
    """time.monotonic() of the last change of activity."""


class Page:
    """The slots of one node, mapped into this process."""

    def __init__(self, file: int, num_slots: int) -> None:
        self._memory = mmap.mmap(file, num_slots * SLOT_BYTES)
        # One store each: struct makes a field zero before it writes it, and a reader sees that.
        self._times = memoryview(self._memory).cast("d")
        self._words = memoryview(self._memory).cast("Q")
        self.num_slots = num_slots

    def read(self, slot: int) -> Slot:
        """Return what the slot shows now."""
        beat_s, word, progress_s = _FIELDS.unpack_from(self._memory, slot * SLOT_BYTES)
        return Slot(
            beat_s=beat_s,
            step=word >> _STEP_SHIFT,
            activity=Activity((word >> 16) & 0xFF),
            micro_batch=word & 0xFFFF,
            progress_s=progress_s,
        )

    def clear(self, slot: int) -> None:
        """Forget what an earlier worker left in the slot."""
        first = self._first(slot)
        self._words[first + _WORD] = self._words[first + _ASKED] = 0
        self._times[first + _PROGRESS] = self._times[first + _BEAT] = 0.0

    def beat(self, slot: int) -> None:
        """Show that the process runs."""
        self._times[self._first(slot) + _BEAT] = time.monotonic()

    def mark(self, slot: int, step: int, activity: Activity, micro_batch: int = 0) -> None:
        """Show where the training thread is."""
        word = step << _STEP_SHIFT | activity << 16 | min(micro_batch, 0xFFFF)
        first = self._first(slot)
        # The time first: an old one would make the new activity look as if it had stood still.
        self._times[first + _PROGRESS] = time.monotonic()
        self._words[first + _WORD] = word

    def ask_to_end(self, slot: int) -> None:
        """Note that the agent asks the worker to end."""
        self._words[self._first(slot) + _ASKED] = 1

    def is_asked_to_end(self, slot: int) -> bool:
        """Return whether the agent has asked the worker to end."""
        return self._words[self._first(slot) + _ASKED] != 0

    def close(self) -> None:
        """Unmap the page."""
        self._times.release()
        self._words.release()
        self._memory.close()

    def _first(self, slot: int) -> int:
        """Return the number of a slot's first field; raises IndexError where there is no slot."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        return slot * SLOT_BYTES // _FIELD_BYTES


def create_page(num_slots: int) -> int:
    """Return the descriptor of a new page; it exists as long as a process holds the descriptor."""
    file = os.memfd_create(PAGE_NAME)
    os.ftruncate(file, num_slots * SLOT_BYTES)
    return file
