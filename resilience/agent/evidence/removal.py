"""Whether the folder of a run was removed while the run runs."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

REMOVED = "the run's folder was removed"
REMOVED_STATUS = 2
"""Exit status of an agent whose run's folder was removed: nothing starts it again."""
_LOOK_EVERY_S = 2.0
_LOOKS = 2
"""The folder counts as removed after so many looks in a row that found nothing."""


class FolderWatch:
    """Looks, in a thread of its own, for what an agent has made in its run's folder.

    A file server that stands still keeps the thread waiting, and says nothing.
    """

    def __init__(self, made: Collection[Path], every_s: float = _LOOK_EVERY_S) -> None:
        self.is_removed = False
        """Whether nothing of it is there any more."""
        self._made, self._every_s = made, every_s
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
            num_missed = 0 if is_any_there(self._made) else num_missed + 1
        self.is_removed = num_missed == _LOOKS or not is_any_there(self._made)


def is_any_there(paths: Collection[Path]) -> bool:
    """Return whether one of the paths is there, or cannot be looked at."""
    try:
        return not paths or any(path.exists() for path in paths)
    except OSError:
        return True
