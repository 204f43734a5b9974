"""Evidence that an agent has ended, with all its workers, although it has not said so.

On one machine it is a lock of the kernel's. Every process of a node holds the lock of the node's
file in the run's folder, and the kernel lets it go with the last of them: one that stands still,
or that not even SIGKILL ends, still holds it. Another machine's file says nothing, whatever its
lock: a file server forgets locks, and one that does not know of any grants them to everybody. So
the file names the boot of its machine's kernel, and has to lie in a file system of that machine.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from resilience.plain_files import open_plain

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LAUNCHER_LOCK = "launcher.lock"
"""File of a run's folder whose lock the run's launcher holds on its own machine."""
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""Types of file systems in which one kernel alone keeps the locks."""


def read_boot_id() -> str:
    """Return what names this start of the machine; empty where that is not known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def hold_lock(path: Path) -> int:
    """Make a file and hold its lock; returns the descriptor, which goes on to whoever inherits it.

    Raises OSError where the folder takes none.
    """
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def is_lock_held(path: Path) -> bool | None:
    """Return whether a process holds a file's lock, None where this machine cannot know it.

    That is where the file is gone or cannot be read, or other kernels may keep its locks.
    """
    with suppress(OSError), open(path, opener=open_plain) as file:
        if not _is_local(file.fileno()):
            return None
        return is_file_locked(file.fileno())
    return None


def is_file_locked(file: int) -> bool:
    """Return whether another holds the lock of an open file."""
    try:
        # Shared: two that ask at once do not take each other for the holder.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def open_names(process: Path, *, locked: bool = False) -> list[str]:
    """Return the names of what a process, a folder of /proc, has open; of a foreign one nothing.

    `locked` leaves out what it does not hold locked.
    """
    names: list[str] = []
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                if not locked or " FLOCK " in (process / "fdinfo" / link.name).read_text():
                    names.append(str(link.readlink()))
    return names


def _is_local(file: int) -> bool:
    """Return whether an open file lies in a file system that no other machine writes."""
    words = Path(f"/proc/self/fdinfo/{file}").read_text().split()
    mount = words[words.index("mnt_id:") + 1] if "mnt_id:" in words else ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, kind = line.partition(" - ")
        if place.split()[0] == mount:
            return kind.split()[0] in _LOCAL
    return False
