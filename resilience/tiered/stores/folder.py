"""Objects in a plain folder that all nodes see: a shared disk.

An object is written under a draft's name, brought to the disk, and then renamed.
Its writer holds a lock on the draft, which ends with the writer: a draft without
one was left by the dead.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from resilience.plain_files import open_plain
from resilience.tiered.errors import TierError
from resilience.tiered.stores.deadline import Calls, Hung
from resilience.tiered.stores.objects import BLOCK_BYTES, Stored, blocks_of
from resilience.tiered.stores.store import Store

_DRAFTS = "drafts"
_DRAFT_S = 24 * 3600.0
"""Age after which a draft is nobody's, on a file system that knows no locks."""
_RENAMES_MAX = 8
"""How often the folder of a step may go, with the step, just before a file comes into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSettings:
    """Where the folder is, and how long it may take."""

    folder: Path
    """Its parent has to be there: a disk that is not mounted is not filled beside its mount."""
    deadline_s: float = 60.0
    """For one operation without its bytes; `Calls` adds the time for these."""


def open_folder(settings: FolderSettings) -> Store:
    """Return the store in this folder; touches nothing yet."""
    return Store(FolderObjects(settings))


class FolderObjects:
    """Files below a folder; see `Objects`. Made in one process and used there."""

    def __init__(self, settings: FolderSettings) -> None:
        self._settings = settings
        self._root = settings.folder
        self._hung = Hung()

    def write(self, name: str, num_bytes: int, pieces: Iterable[memoryview]) -> None:
        """Write a file as a draft, and rename it when the disk has it."""
        path = self._root / name
        what = f"writing {path}"
        with self._calls(what, num_bytes) as calls:
            draft = _Draft(self._root)
            try:
                calls.call(draft.open, self._root / name.partition("/")[0] / _DRAFTS)
                # The disk's thread never reads memory that the caller may use again.
                block = bytearray(min(BLOCK_BYTES, num_bytes))
                for piece in blocks_of(pieces, num_bytes, what):
                    part = memoryview(block)[: piece.nbytes]
                    part[:] = piece
                    calls.call(draft.append, part)
                calls.call(draft.place, path)
            finally:
                calls.undo(draft.remove)

    def read(self, name: str, num_bytes: int, begin: int, into: memoryview) -> None:
        """Fill `into` from a file of exactly `num_bytes`."""
        path = self._root / name
        with self._calls(f"reading {path}", into.nbytes) as calls:
            opened = ExitStack()
            try:
                file = calls.call(_open, opened, path, num_bytes)
                block = bytearray(min(BLOCK_BYTES, into.nbytes))
                for done in range(0, into.nbytes, BLOCK_BYTES):
                    part = memoryview(block)[: into.nbytes - done]
                    calls.call(_fill, file, part, begin + done)
                    into[done : done + part.nbytes] = part
            finally:
                calls.undo(opened.close)

    def find(self, name: str) -> Stored | None:
        """Return what is known of a file; None where there is none."""
        path = self._root / name
        with self._calls(f"looking for {path}") as calls:
            return calls.call(_find, path, name)

    def find_all(self, prefix: str) -> list[Stored]:
        """Return all files whose names begin so."""
        with self._calls(f"listing {self._root / prefix}") as calls:
            return calls.call(_list, self._root, prefix)

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, and folders that are empty then."""
        with self._calls(f"deleting from {self._root}") as calls:
            for name in names:
                calls.call(_delete, self._root, name)
                calls.renew()
            for folder in {(self._root / name).parent for name in names}:
                calls.call(_sync_folder, folder)
                calls.renew()

    def clean(self, namespace: str) -> None:
        """Remove the drafts whose writers are dead."""
        folder = self._root / namespace / _DRAFTS
        with self._calls(f"cleaning {folder}") as calls:
            for each in calls.call(_entries, folder):
                calls.call(_remove_dead, Path(each))
                calls.renew()

    def _calls(self, what: str, num_bytes: int = 0) -> closing[Calls]:
        return closing(Calls(what, self._settings.deadline_s, self._hung, num_bytes))


class _Draft:
    """A file that counts for nothing before it has its place."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root
        self._file = -1

    def open(self, folder: Path) -> None:
        """Make the file, and lock it."""
        _make_folders(self._root, folder)
        while True:
            path = folder / secrets.token_hex(16)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._path = path
            with suppress(OSError):
                # Not every shared disk knows locks; drafts on it are known by their age.
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._file).st_nlink:
                return
            # Somebody cleaned up between the two.
            os.close(self._file)

    def append(self, block: memoryview) -> None:
        """Write all of a block."""
        done = 0
        while done < block.nbytes:
            done += os.write(self._file, block[done:])

    def place(self, path: Path) -> None:
        """Give the file its name, when the disk has all of it."""
        os.fsync(self._file)
        for left in reversed(range(_RENAMES_MAX)):
            _make_folders(self._root, path.parent)
            try:
                self._path.rename(path)
                break
            except FileNotFoundError:
                if not left or not self._path.exists():
                    raise
        _sync_folder(path.parent)

    def remove(self) -> None:
        """Close the file, and remove it where it has no place yet."""
        if self._file >= 0:
            with suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._file)


def _open(opened: ExitStack, path: Path, num_bytes: int) -> int:
    """Open a file, which has to have this size; `opened` closes it."""
    file = open_plain(path, os.O_RDONLY)
    opened.callback(os.close, file)
    if (size := os.fstat(file).st_size) != num_bytes:
        raise TierError(f"{size} bytes there, {num_bytes} expected")
    return file


def _fill(file: int, block: memoryview, offset: int) -> None:
    """Read all of a block."""
    done = 0
    while done < block.nbytes:
        size = os.preadv(file, [block[done:]], offset + done)
        if not size:
            raise TierError(f"the file ends at byte {offset + done}")
        done += size


def _make_folders(root: Path, folder: Path) -> None:
    """Make the folders from the root on that are missing, and bring them to the disk."""
    missing = [each for each in (folder, *folder.parents) if each.is_relative_to(root)]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
            _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk; one that is gone has none."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _find(path: Path, name: str) -> Stored | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Stored(name, status.st_size, status.st_mtime)


def _list(root: Path, prefix: str) -> list[Stored]:
    if not root.exists():
        # Raises where the disk is not there at all: that is not the same as nothing stored.
        root.parent.stat()
        return []
    begin = root / prefix.rpartition("/")[0]
    names = (str(each.relative_to(root)) for each in _walk(begin))
    found = (_find(root / name, name) for name in names if name.startswith(prefix))
    return [each for each in found if each is not None]


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder; what goes meanwhile may be left out."""
    for each in _entries(folder):
        path = Path(each)
        if each.is_dir(follow_symlinks=False):
            yield from _walk(path)
        else:
            yield path


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _delete(root: Path, name: str) -> None:
    """Delete a file, and its folder with the last of a step."""
    path = root / name
    with suppress(FileNotFoundError):
        path.unlink()
    with suppress(OSError):
        (path.parent / _DRAFTS).rmdir()
    with suppress(OSError):
        path.parent.rmdir()


def _remove_dead(path: Path) -> None:
    """Remove a draft that nobody writes to any more."""
    try:
        file = open_plain(path, os.O_WRONLY)
    except OSError:
        return  # It has gone, or is no draft of ours.
    try:
        if _is_dead(file):
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _is_dead(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return os.fstat(file).st_mtime < time.time() - _DRAFT_S
    return True
