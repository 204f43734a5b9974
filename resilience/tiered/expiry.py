"""Arenas that nobody has used for long, removed by whoever starts next on the node."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resilience.tiered.arena import LOCK_NAME, LOCK_TEXT

_OURS = re.compile(
    r"segment-\d{1,18}(\.meta(\.new)?)?|(jobs|copies|http-namespaces)\.(json(\.new)?|new)|memoryd\.sock"
)
"""All that a daemon leaves in its arena beside the lock."""


def remove_expired(own: Path, *, expire_s: float) -> list[Path]:
    """Remove the arenas beside `own` that were last used so long ago; returns which went.

    Only folders of this user with the lock of an arena that nobody holds. What is none of a
    daemon's files stays, with its folder; a link is never followed. The last use is the last
    shard that was taken or dropped, or the daemon's end. Whatever fails is left as it is.
    """
    gone = []
    with suppress(OSError):
        for path in sorted(own.parent.iterdir()):
            with suppress(OSError):
                if path != own and _remove(path, expire_s):
                    gone.append(path)
    return gone


def remove_arena(path: Path) -> bool:
    """Remove the arena of a daemon that has ended, whenever it was used last.

    Returns False for a folder that is no arena of this user. Raises BlockingIOError where a daemon
    has it, and OSError where something in it is somebody else's, or nothing can be removed.
    """
    return _remove(path, None)


def _remove(path: Path, expire_s: float | None) -> bool:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            return False
        with _opened(LOCK_NAME, os.O_RDWR, folder=folder) as lock:
            used_s = max(status.st_mtime, os.fstat(lock).st_mtime)
            is_arena = os.pread(lock, len(LOCK_TEXT), 0) == LOCK_TEXT
            is_due = expire_s is None or 0 <= expire_s < time.time() - used_s
            if not is_arena or not is_due:
                return False
            # Its daemon lives, if there is one: BlockingIOError, and nothing is removed.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)
            os.unlink(LOCK_NAME, dir_fd=folder)
            path.rmdir()
    return True


def _empty(folder: int) -> None:
    """Remove what is a daemon's; OSError where anything else is left."""
    is_foreign = False
    for name in os.listdir(folder):
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if _OURS.fullmatch(name) and (stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
            os.unlink(name, dir_fd=folder)
        elif name != LOCK_NAME:
            is_foreign = True
    if is_foreign:
        raise OSError("somebody else's files are in it")


@contextmanager
def _opened(path: str | Path, flags: int, *, folder: int | None = None) -> Iterator[int]:
    # A link is not followed, and a pipe or device not waited for.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)
