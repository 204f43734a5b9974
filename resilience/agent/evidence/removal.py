"""Whether the folder of a run was removed, or replaced by another one, while the run runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

REMOVED = "the run's folder was removed"
REMOVED_STATUS = 2
"""Exit status of an agent whose run's folder was removed: nothing starts it again."""
EVERY_S = 2.0
_LOOKS = 2
"""The folder counts as removed after so many looks in a row that found nothing."""
Ask = Callable[[], bool]


class FolderWatch:
    """Looks, in a thread of its own, for what an agent has made in its run's folder.

    A file server that stands still keeps the thread waiting, and says nothing.
    """

    def __init__(self, made: Collection[Path], is_other: Ask, every_s: float = EVERY_S) -> None:
        """`is_other` returns whether another folder has the name of the run's folder."""
        self.is_removed = False
        """Whether nothing of it is there any more, or another folder has its name."""
        self._made, self._is_other, self._every_s = made, is_other, every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="folder-watch", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Look a last time, for a bounded time; returns whether the folder was removed."""
        self._closed.set()
        self._thread.join(self._every_s)
        return self.is_removed

    def _watch(self) -> None:
        num_missed = 0
        while num_missed < _LOOKS and not self._closed.wait(self._every_s):
            num_missed = 0 if self._is_there() else num_missed + 1
        self.is_removed = num_missed == _LOOKS or not self._is_there()

    def _is_there(self) -> bool:
        return is_any_there(self._made) and not self._is_other()


def is_any_there(paths: Collection[Path]) -> bool:
    """Return whether one of the paths is there, or cannot be looked at."""
    try:
        return not paths or any(path.exists() for path in paths)
    except OSError:
        return True


def is_other(file: int, own: Path) -> bool:
    """Return whether another folder than an open one has the run's folder's name.

    `file` is the descriptor of the open folder, which keeps its inode from being given to another.
    `own` is the agent's file two levels below the folder's name. Where a file system was mounted
    anew, that file shows that the folder is the same. False where that cannot be known.
    """
    try:
        is_same = os.path.samestat(os.fstat(file), own.parent.parent.stat())
        return not is_same and not own.exists()
    except OSError:
        return False
