"""The folder of an arena: made for one user, locked for one daemon, removed when long unused.

Whoever starts next on the node removes those that nobody has used for long. The arenas of a run
have random names, which the run's folder keeps: no other user can make a folder of that name first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resilience.tiered.errors import ArenaError
from resilience.whole_files import replace_text

SHARED_MEMORY = Path("/dev/shm")
_LOCK_TRIES = 10
LOCK_NAME = "lock"
LOCK_TEXT = b"memoryd "
"""What the lock's file begins with; then comes the number of the process that has it."""
_OURS = re.compile(
    r"segment-\d{1,18}(\.meta(\.new)?)?|(jobs|copies|http-namespaces)\.(json(\.new)?|new)|memoryd\.sock"
)
"""All that a daemon leaves in its arena beside the lock."""
_NOTES = "arenas"
"""Folder in that of the run with a file for each node, which has the name of the node's arena."""
_ARENA = re.compile(r"memoryd-\d+-[0-9a-f]{10}-\w{8}-[^/\s]+")


def open_arena(run_dir: Path, node: str) -> Path:
    """Return the arena of a run's node; makes a new one where this user has none on this machine.

    The next start of the node finds the arena again. Raises OSError, with nothing made.
    """
    place = _place(run_dir)
    note = run_dir / _NOTES / f"{place}-{node}"
    folder = read_arenas(run_dir).get(node)
    if folder is not None and is_own(folder):
        return folder
    # Where the run's folder was removed meanwhile, the arena of the run before is still there.
    left = [each for each in find_arenas(run_dir) if each.name.endswith(f"-{node}")]
    folder = left[0] if left else _make_arena(place, node)
    try:
        note.parent.mkdir(exist_ok=True)
        replace_text(note, folder.name, node)
    except OSError:
        if not left:
            folder.rmdir()
        raise
    return folder


def _make_arena(place: str, node: str) -> Path:
    prefix = f"memoryd-{os.geteuid()}-{place}-"
    return Path(tempfile.mkdtemp(dir=SHARED_MEMORY, prefix=prefix, suffix=f"-{node}"))


def read_arenas(run_dir: Path) -> dict[str, Path]:
    """Return the arenas that the run's folder names, by node, each on its own node's machine.

    A copy of the folder names none: the arenas are those of the run that was copied.
    """
    found = {}
    for note in sorted((run_dir / _NOTES).glob(f"{_place(run_dir)}-*")):
        name = ""
        with suppress(OSError):  # a note that cannot be read names none
            name = note.read_text("utf-8", errors="replace")
        if _ARENA.fullmatch(name):
            found[note.name.partition("-")[2]] = SHARED_MEMORY / name
    return found


def find_arenas(run_dir: Path) -> list[Path]:
    """Return this user's arenas of the run on this machine, also those that no note names."""
    named = read_arenas(run_dir).values()
    beside = SHARED_MEMORY.glob(f"memoryd-{os.geteuid()}-{_place(run_dir)}-*")
    return sorted(filter(is_own, {*named, *beside}))


def _place(run_dir: Path) -> str:
    return hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:10]


def is_own(folder: Path) -> bool:
    """Return whether there is a folder of this user, and not a link to one."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def make_folder(folder: Path) -> None:
    """Make the folder (0700); raises ArenaError where it is not this user's own."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ArenaError(f"{folder} is no folder of its own, but a link to one")
    if status.st_uid != os.geteuid():
        raise ArenaError(f"{folder} belongs to user {status.st_uid}, not to {os.geteuid()}")
    folder.chmod(0o700)


def lock_folder(folder: Path) -> int:
    """Return the descriptor that holds the lock, with this process's number in the file."""
    path = folder / LOCK_NAME
    for _ in range(_LOCK_TRIES):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(file, len(LOCK_TEXT) + 20, 0).removeprefix(LOCK_TEXT)
            pid = text.decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise ArenaError(
                f"the folder {folder} is in use by the memoryd with pid {pid}; "
                "end that one, or take another folder"
            ) from None
        if os.fstat(file).st_nlink:
            os.ftruncate(file, 0)
            os.pwrite(file, LOCK_TEXT + f"{os.getpid()}\n".encode(), 0)
            return file
        # A daemon that removed its folder meanwhile took this very file with it.
        os.close(file)
    raise ArenaError(f"{folder} is removed again and again by other daemons")


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
    with suppress(OSError):
        path.rmdir()  # Empty: the daemon or its removal was killed, and the lock is not there.
        return True
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
    for name in os.listdir(folder):
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if _OURS.fullmatch(name) and (stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
            os.unlink(name, dir_fd=folder)
    if os.listdir(folder) != [LOCK_NAME]:
        raise OSError("somebody else's files are in it")


@contextmanager
def _opened(path: str | Path, flags: int, *, folder: int | None = None) -> Iterator[int]:
    # A link is not followed, and a pipe or device not waited for.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)
