"""A segment of the arena in a worker's memory."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress


class Map:
    """A segment in this process's memory."""

    def __init__(self, file: int, size: int, *, is_writable: bool) -> None:
        right = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.is_writable = is_writable
        self.memory = memoryview(mmap.mmap(file, size, flags=flags, prot=right))
        self._file = os.dup(file)

    def is_removed(self) -> bool:
        """Return whether the daemon has removed the segment."""
        return os.fstat(self._file).st_nlink == 0

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._file)
