"""The folders that caches lie in: who may use them, how long they stay, how they are removed.

A root belongs to one job on one node. Every process that uses it holds a lease, a shared lock on
`alive.lock`, which ends with the process in whatever way that ends. Nothing is removed while
somebody holds a lease. A folder goes by being renamed to a hidden name first: what a removal
leaves behind when it is killed is found under that name, and the next one removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resilience.data.errors import CacheFolderError
from resilience.data.marker import (
    MARKER_NAME,
    Marker,
    is_root,
    marker_text,
    read_marker,
    read_other,
    write_text,
)

ALIVE_NAME = "alive.lock"
DESCRIPTION_NAME = "cache.json"
PRODUCER_LOCK_NAME = "producer.lock"

Clock = Callable[[], float]
EndProducer = Callable[[Path], None]
"""Ends the producer of a cache that nobody reads from."""

_REMOVED_PREFIX = ".batch-cache-removed-"
_LOCK_MAX_S = 30.0
_LOCK_PAUSE_S = 0.005
_REMOVE_TRIES = 100
_CACHE = re.compile(r"(?P<stage>train|val)-(?P<rank>\d+)of(?P<size>\d+)-[0-9a-f]{16}")
_FOREIGN = {"lost+found"}
"""What a file system puts into an empty volume by itself."""

_REMEDIES = {
    errno.ENOENT: "set resilience.mmap.folder to a folder that can be made; where somebody has "
    "removed this one, make the loader anew",
    errno.ENOSPC: "make room there, or set resilience.mmap.folder to another file system",
    errno.EDQUOT: "make room there, or set resilience.mmap.folder to another file system",
}
_REMEDY = "set resilience.mmap.folder to a folder that this user can write to"


def _leave(_cache: Path) -> None:
    pass


class RootLease:
    """The right to use a root: as long as it is held, nobody removes anything that is in use.

    Ends with `close`, and with the process. Children that are forked hold it too, those of
    subprocess do not. One thread.
    """

    def __init__(self, path: Path, job: str, file: int, clock: Clock) -> None:
        self.path = path
        self.job = job
        self._file = file
        self._clock = clock
        self._caches: dict[str, int] = {}

    def touch(self) -> None:
        """Note that the cache is in use now: the time to keep it counts from here."""
        if self._file != -1:
            now_s = self._clock()
            os.utime(self._file, (now_s, now_s))

    def hold(self, name: str, file: int) -> None:
        """Keep a lock on a cache of the root for as long as the lease is held."""
        if name in self._caches:
            os.close(file)
        else:
            self._caches[name] = file

    def fileno(self) -> int:
        """Return the descriptor of the lock, which a forked child may close."""
        return self._file

    def close(self) -> None:
        """Give the lease back; the files stay for their keep time. A second call does nothing."""
        if self._file == -1:
            return
        self.touch()
        for file in (*self._caches.values(), self._file):
            os.close(file)
        self._caches.clear()
        self._file = -1

    def end(self, *, end_producer: EndProducer = _leave) -> None:
        """Give the lease back for good: the root goes with the last lease, as the job is over.

        `end_producer` is called for each cache, to end a producer that has no consumer.
        """
        if self._file == -1:
            return
        self.close()
        with explaining(self.path):
            for path in _caches(self.path):
                end_producer(path)
            with _locked(self.path / ALIVE_NAME, os.O_RDWR) as file:
                if file is None:
                    return
                hidden = _hide_all(self.path)
            for path in hidden:
                _remove(path)


def open_root(
    root: Path,
    job: str,
    keep_s: float,
    *,
    removes_expired: bool = True,
    clock: Clock = time.time,
) -> RootLease:
    """Make the folder for a job's caches, or use it again, and hold a lease on it.

    With `removes_expired`, roots beside it whose keep time is over are removed, which takes
    seconds where they hold gigabytes. What a job that has ended left in this very folder is
    removed in any case. Raises CacheFolderError for a link, a folder of another user, one
    that holds other files, one that a living job of another name uses, and one that cannot
    be written to.
    """
    marker = Marker(job=job, keep_s=keep_s)
    with explaining(root):
        lease = RootLease(root, job, _hold_root(root, marker), clock)
        try:
            write_text(root / MARKER_NAME, marker_text(marker))
            lease.touch()
            if removes_expired:
                remove_expired(root, clock=clock)
        except BaseException:
            lease.close()
            raise
    return lease


def open_cache(lease: RootLease, name: str, description: str) -> Path:
    """Make the folder of a cache, or use it again; it is not removed while the lease is held.

    `name` comes from `cache_name`.
    """
    folder = lease.path / name
    with explaining(folder):
        flags = os.O_RDONLY | os.O_DIRECTORY
        lease.hold(name, _hold(folder, flags, lambda: _make_folder(folder)))
        write_text(folder / DESCRIPTION_NAME, description)
    return folder


def remove_old_caches(root: Path, name: str, *, end_producer: EndProducer = _leave) -> None:
    """Remove the caches that the one of this name has taken the place of.

    Those of the same stage that are of the same position under another description, or of
    another number of positions, except those that somebody uses: a changed recipe leaves no old
    bytes. `end_producer` is called for each of them first, which may take seconds.
    """
    with explaining(root):
        for path in _old_caches(root, name):
            end_producer(path)
            _remove_unused(path)
        _finish_removals(root)


def remove_expired(root: Path, *, clock: Clock = time.time) -> tuple[Path, ...]:
    """Remove the roots beside `root` whose jobs have ended and whose keep time is over.

    Also finishes removals that were killed. Returns what was removed; warns of what cannot be.
    """
    removed = []
    try:
        beside = [path for path in _own_folders(root.parent) if path.name != root.name]
    except PermissionError:  # a folder that can be entered, but not listed
        return ()
    for path in beside:
        try:
            if is_root(path) and _remove_if_expired(path, clock()):
                removed.append(path)
        except OSError as error:
            _warn_of_rest(path, error)
    _finish_removals(root.parent)
    return tuple(removed)


def remove_root(root: Path, job: str) -> bool:
    """Remove the caches of a job that has ended, whatever their keep time.

    Returns False where the folder is no root of this job, or a process uses it. Raises
    CacheFolderError.
    """
    with explaining(root):
        marker = read_marker(root)
        if marker is None or marker.job != job:
            return False
        with _locked(root / ALIVE_NAME, os.O_RDWR | os.O_CREAT) as file:
            if file is None:
                return False
            hidden = _hide_all(root)
        for path in hidden:
            _remove(path)
    return True


def _hold_root(root: Path, marker: Marker) -> int:
    """Return a descriptor with the lock of a root that is this job's, or nobody's yet."""
    while True:
        # Looked at before it is locked: a lock for the moment of looking would seem to
        # others the lock of the other job.
        if other := read_other(root, marker.job):
            with suppress(FileNotFoundError):  # removed in this moment
                _make_root(root)
                _take_over(root, other, marker)
        file = _hold(root / ALIVE_NAME, os.O_RDWR | os.O_CREAT, lambda: _make_root(root))
        if read_other(root, marker.job) is None:
            return file
        os.close(file)


def _make_root(root: Path) -> None:
    """Make the folder, for this user alone; CacheFolderError where it is something else.

    Raises FileNotFoundError where somebody removes it in this moment.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    _make_folder(root)
    status = root.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise CacheFolderError(
            f"{root} is a link, which can lead anywhere; set resilience.mmap.folder "
            "to the folder itself"
        )
    if status.st_uid != os.geteuid():
        raise CacheFolderError(
            f"{root} belongs to user {status.st_uid}, not to {os.geteuid()}; "
            "set resilience.mmap.folder to a folder of your own, or to a new one"
        )
    if not is_root(root):
        _refuse_others_files(root)
    if stat.S_IMODE(status.st_mode) != 0o700:
        root.chmod(0o700)


def _refuse_others_files(root: Path) -> None:
    """Raise CacheFolderError where a folder that was not ours holds somebody's files.

    Between the looks another process may make the folder ours, and a third may then remove it.
    A folder that is held open shares its inode with no later one, so that what stands at the
    path in the end has stood there all the time. Otherwise FileNotFoundError.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        others = sorted({each.name for each in root.iterdir()} - {ALIVE_NAME} - _FOREIGN)
        if not others or is_root(root):
            return
        if not _stands_at(folder, root):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root))
    finally:
        os.close(folder)
    raise CacheFolderError(
        f"{root} holds other files, such as {others[0]}; "
        "set resilience.mmap.folder to a folder that is empty or new"
    )


def _make_folder(folder: Path) -> None:
    # With exist_ok, pathlib raises where the folder is removed in this moment.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def _hold(path: Path, flags: int, make_folder: Callable[[], None]) -> int:
    """Return a descriptor with a shared lock on what stands at `path`.

    Whoever removes has the lock for itself for the moment of the renaming, and then what is
    locked stands elsewhere: it is made anew. flock cannot wait with a deadline, so it is
    asked again.
    """
    end_s = time.monotonic() + _LOCK_MAX_S
    num_missing = 0
    while True:
        try:
            make_folder()
            file = os.open(path, flags | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            num_missing += 1
            if num_missing == _REMOVE_TRIES:  # nobody removes as often
                raise
        else:
            if _lock(file, fcntl.LOCK_SH) and _stands_at(file, path):
                return file
            os.close(file)
        if time.monotonic() > end_s:
            raise CacheFolderError(
                f"{path} has been locked by a process that removes it for {_LOCK_MAX_S:g} s; "
                "end that process, or set resilience.mmap.folder to another folder"
            )
        time.sleep(_LOCK_PAUSE_S)


def _lock(file: int, kind: int) -> bool:
    """Lock a file, or say that others have it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stands_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def _locked(path: Path, flags: int, kind: int = fcntl.LOCK_EX) -> Iterator[int | None]:
    """Hold what stands at `path`, for oneself alone; None where others are in the way."""
    try:
        file = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        yield None
        return
    try:
        yield file if _lock(file, kind) and _stands_at(file, path) else None
    finally:
        os.close(file)


def _take_over(root: Path, old: Marker, new: Marker) -> None:
    """Give the folder of a job that has ended to another; what it holds is removed.

    Whoever has the lock alone writes the new marker. So where a shared lock is to be had
    and the old marker stands there still, what was in the way is the old job. Otherwise
    the caller looks again.
    """
    with _locked(root / ALIVE_NAME, os.O_RDWR | os.O_CREAT) as file:
        if file is not None and read_marker(root) == old:
            for path in _caches(root):
                _hide(path)
            write_text(root / MARKER_NAME, marker_text(new))
    if file is not None:
        _finish_removals(root)
        return
    with _locked(root / ALIVE_NAME, os.O_RDWR, fcntl.LOCK_SH) as shared:
        if shared is not None and read_marker(root) == old:
            raise CacheFolderError(
                f"{root} is in use by the job {old.job!r}; set resilience.mmap.folder "
                f"to a folder of its own for the job {new.job!r}"
            )


def _remove_if_expired(path: Path, now_s: float) -> bool:
    """Remove a root if nobody holds it and its keep time is over."""
    with _locked(path / ALIVE_NAME, os.O_RDWR | os.O_CREAT) as file:
        marker = read_marker(path)
        if file is None or marker is None or _last_use_s(path, file) + marker.keep_s > now_s:
            return False
        hidden = _hide(path)
    # Not under the lock: whoever waits for it can go on, in a new folder.
    _remove(hidden)
    return True


def _last_use_s(root: Path, file: int) -> float:
    """Return when a root was used last, also where all its processes were killed at once.

    A lease is then not given back; but a producer has made files until then.
    """
    times = [os.fstat(file).st_mtime]
    times += [path.stat().st_mtime for path in _caches(root)]
    return max(times)


def _old_caches(root: Path, name: str) -> list[Path]:
    """Return the caches that the one of this name takes the place of."""
    wanted = _CACHE.fullmatch(name)
    if wanted is None:
        raise ValueError(f"{name!r} is no name of a cache; want one of cache_name")
    old = []
    for path in _own_folders(root):
        match = _CACHE.fullmatch(path.name)
        if match is None or path.name == name or match["stage"] != wanted["stage"]:
            continue
        if match["rank"] == wanted["rank"] or match["size"] != wanted["size"]:
            old.append(path)
    return old


def _remove_unused(cache: Path) -> None:
    """Remove a cache unless a process has it open or its producer lives."""
    with (
        _locked(cache, os.O_RDONLY | os.O_DIRECTORY) as folder,
        _locked(cache / PRODUCER_LOCK_NAME, os.O_RDWR | os.O_CREAT) as producer,
    ):
        if folder is None or producer is None:
            return
        hidden = _hide(cache)
    _remove(hidden)


def _hide(path: Path) -> Path:
    """Rename a folder to a name under which any process may remove it."""
    return path.rename(path.with_name(_REMOVED_PREFIX + secrets.token_hex(8)))


def _hide_all(root: Path) -> list[Path]:
    """Hide a root, or its caches where it is a volume of its own, which cannot be renamed."""
    try:
        return [_hide(root)]
    except OSError:
        return [_hide(path) for path in _caches(root)]


def _caches(root: Path) -> list[Path]:
    try:
        return [path for path in _own_folders(root) if _CACHE.fullmatch(path.name)]
    except FileNotFoundError:  # another one has ended the job just before
        return []


def _finish_removals(parent: Path) -> None:
    """Remove what others have hidden there and were killed over, or are removing now."""
    for path in _own_folders(parent):
        if path.name.startswith(_REMOVED_PREFIX):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder that others may be removing, too."""
    for _ in range(_REMOVE_TRIES):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            # Somebody else was faster with a part, or with all of it.
            if path.exists():
                continue
        except OSError as error:
            _warn_of_rest(path, error)
        return


def _warn_of_rest(path: Path, error: OSError) -> None:
    warnings.warn(
        f"cannot remove the old batch cache {path}: {error.strerror}; remove it by hand",
        RuntimeWarning,
        stacklevel=2,
    )


def _own_folders(parent: Path) -> list[Path]:
    """Return the folders in a folder that belong to this user, without links."""
    found = []
    with os.scandir(parent) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.append(parent / entry.name)
    return sorted(found)


@contextmanager
def explaining(folder: Path) -> Iterator[None]:
    """Make an error of the file system one that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, _REMEDY)
        raise CacheFolderError(
            f"cannot use the cache folder {folder}: {error.strerror}; {remedy}"
        ) from error
