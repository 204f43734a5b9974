"""Files of shared memory under a budget, kept and used again.

Fresh pages cost ten to fifty times touched ones, so a segment's pages are made once and
the segment serves one shard after the other. A segment counts only while a description
stands beside it, which is put there by a rename: whatever ends the daemon, the next one
finds whole segments or none. The folder belongs on tmpfs: it outlives the daemon, not
the machine.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from resilience.tiered.arena_folder import LOCK_NAME, lock_folder, make_folder
from resilience.tiered.errors import ArenaError, VaultFullError

_WASTE_MAX = 1.25
"""How much larger than asked for a segment may be that is used again."""

_PIECE_BYTES = 64 << 20
"""How much memory is made at a time: a signal makes the kernel begin a piece anew."""

_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""

SEGMENT = "segment-"
"""What the names of all files of segments begin with."""
_NAME = re.compile(SEGMENT + r"(0|[1-9]\d{0,17})")
_LEFTOVER = re.compile(SEGMENT + r"\d{1,18}\.meta(\.new)?")
_META_BYTES_MAX = 1 << 30
_REMOVE_MAX_S = 60.0

Allocate = Callable[[int, int, int], None]
"""Makes the memory of a file from a begin for so many bytes, as os.posix_fallocate does."""
_ZEROS = bytes(1 << 20)


def allocate_touched(file: int, begin: int, size: int) -> None:
    """Make memory and touch it: OSError where there is none, and then none is made.

    posix_fallocate alone finds pages and leaves them to whoever maps them first, whom that holds
    up for up to 1.5 s a GiB.
    """
    os.posix_fallocate(file, begin, size)
    for at in range(begin, begin + size, len(_ZEROS)):
        os.pwrite(file, _ZEROS[: begin + size - at], at)


class Segment:
    """A file of whole pages; made, kept and removed by its arena alone."""

    def __init__(self, path: Path, number: int, file: int, size_bytes: int) -> None:
        self.path = path
        self.number = number
        self.size_bytes = size_bytes
        self.file = file
        """Descriptor to read and write with; the arena's own."""
        self.owner = ""
        """Who had it last."""
        self._read_file: int | None = None
        self._memory: memoryview | None = None
        self._lock = threading.Lock()

    def give_to(self, owner: str) -> None:
        """Note who has the segment from now on."""
        self.owner = owner

    @property
    def read_file(self) -> int:
        """Return a descriptor that cannot write; opened on first use, the arena's own."""
        with self._lock:
            if self._read_file is None:
                self._read_file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
            return self._read_file

    @property
    def memory(self) -> memoryview:
        """Return all of it, writable; mapped on first use and kept."""
        with self._lock:
            if self._memory is None:
                self._memory = memoryview(mmap.mmap(self.file, self.size_bytes))
            return self._memory

    def close(self) -> None:
        """Close the descriptors; memory that somebody still views goes with the last view."""
        with self._lock:
            for file in (self.file, self._read_file):
                if file is not None:
                    os.close(file)
            self.file, self._read_file, self._memory = -1, None, None


@dataclass(frozen=True, slots=True)
class Found:
    """A segment that an earlier daemon sealed, and what it is."""

    segment: Segment
    text: bytes


class Arena:
    """The segments of one folder; at most `budget_bytes` of them at any moment.

    Makes the folder (0700) and locks it. Raises ArenaError where it belongs to somebody
    else, another daemon has it, or it holds more than the budget already. Segments that
    were not sealed are removed: somebody may still write to them.

    The budget counts whole segments, free ones too; descriptions, some kilobytes each,
    come on top. There are at most `segments_max` of them; else a third of the descriptors
    that the process may have, since each takes up to three. All methods are thread-safe,
    and memory is made without a lock held.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        *,
        segments_max: int | None = None,
        allocate: Allocate = allocate_touched,
    ) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self._segments_max = segments_max or _count_descriptors() // 3
        self._num_segments = 0
        self._allocate = allocate
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._free: dict[int, Segment] = {}  # the one that was freed longest ago first
        self._leaving: dict[int, Segment] = {}  # being removed, counted until that is done
        self._taken: dict[int, Segment] = {}
        self._coming: dict[int, tuple[int, str]] = {}  # size and owner of what is made to be free
        self._total_bytes = 0
        self._next_number = 0
        self._lock_file = -1
        try:
            make_folder(folder)
            self._lock_file = lock_folder(folder)
            self.found = self._find()
            """What was sealed before this arena was opened; each counts as taken."""
        except OSError as error:
            self.close()
            raise ArenaError(f"cannot use the folder {folder}: {error}") from error
        except ArenaError:
            self.close()
            raise

    @property
    def total_bytes(self) -> int:
        """Return the size of all segments, free ones and those in the making included."""
        return self._total_bytes

    @property
    def used_bytes(self) -> int:
        """Return the size of all segments that are neither free nor being removed."""
        with self._lock:
            return self._total_bytes - self._spare_bytes()

    def take(self, num_bytes: int, owner: str = "") -> Segment:
        """Return a segment of at least `num_bytes` whose content is anything.

        One that this owner had last comes first, since the owner may have it mapped;
        then the best fit; then a new one, for which free ones make room. Blocks while
        memory is made, some 0.1 to 3 s a GiB. Raises VaultFullError where neither the
        budget nor the file system has room.
        """
        size = _whole_pages(num_bytes)
        segment, number = self._pick_or_reserve(size, owner)
        if segment is None:
            segment = self._make(number, size)
        segment.give_to(owner)
        return segment

    def prepare(
        self,
        num_bytes: int,
        owner: str = "",
        *,
        num_segments: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make segments until an owner has so many of at least `num_bytes`, taken ones included.

        Its `take` then makes none, and waits for one that is being made. Blocks as that does.
        Makes no way: where the budget or the file system has no room, or it is not wanted any
        more, there are fewer.
        """
        size = _whole_pages(num_bytes)
        while (number := self._reserve_coming(size, owner, num_segments)) is not None:
            segment = None
            try:
                path = self.folder / f"{SEGMENT}{number}"
                segment = Segment(path, number, self._make_file(path, size, is_wanted), size)
                segment.give_to(owner)
            except OSError:
                return
            finally:
                with self._lock:
                    del self._coming[number]
                    if segment is None:
                        self._count(-size)
                    else:
                        self._free[number] = segment
                    self._changed.notify_all()

    def seal(self, segment: Segment, text: bytes) -> None:
        """Put a description beside the segment, or another in its place.

        From now on a daemon that is started later finds it. Raises VaultFullError where
        the file system has no room; what stood there before stands there still.
        """
        new = _meta_path(segment.path).with_suffix(".meta.new")
        try:
            new.touch(mode=0o600)
            new.write_bytes(text)
            new.replace(_meta_path(segment.path))
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            raise VaultFullError(f"cannot write a description in {self.folder}: {error}") from error

    def unseal(self, segment: Segment) -> None:
        """Take the description away: no later daemon finds the segment."""
        _meta_path(segment.path).unlink(missing_ok=True)

    def free(self, segment: Segment) -> None:
        """Take the segment back, to be used again. Only when nobody writes to it any more."""
        self.unseal(segment)
        with self._lock:
            del self._taken[segment.number]
            self._free[segment.number] = segment

    def discard(self, segment: Segment) -> None:
        """Take the segment back and remove it, because somebody may still write to it.

        Whoever still has it mapped sees zeros, and what is written goes nowhere.
        """
        with self._lock:
            self._leaving[segment.number] = self._taken.pop(segment.number)
        self._remove(segment)

    def trim(self, free_bytes: int, *, owner: str) -> None:
        """Remove free segments as long as so many bytes are left; those of an owner first."""
        superfluous = []
        with self._lock:
            rest = sum(each.size_bytes for each in self._free.values()) - free_bytes
            for segment in sorted(self._free.values(), key=lambda each: each.owner != owner):
                if segment.size_bytes <= rest:
                    rest -= segment.size_bytes
                    superfluous.append(self._leave(segment.number))
        for segment in superfluous:
            self._remove(segment)

    def close(self) -> None:
        """Let go of the folder; what is sealed stays there, what is free goes."""
        with self._lock:
            while self._free:
                self._remove(self._leave(next(iter(self._free))))
            for segment in self._taken.values():
                segment.close()
            self._taken.clear()
            if self._lock_file != -1:
                # When it was used last.
                os.utime(self._lock_file)
                os.close(self._lock_file)
                self._lock_file = -1

    def remove(self) -> None:
        """Remove all segments and the folder with what is ours in it, and close."""
        with self._lock:
            self._changed.wait_for(lambda: not self._leaving, _REMOVE_MAX_S)
            for segment in (*self._free.values(), *self._taken.values()):
                self._remove(segment)
            self._free.clear()
            self._taken.clear()
            # The lists that the vault and the doors keep beside the segments go, too.
            for path in (*self.folder.glob("*.json*"), self.folder / LOCK_NAME):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's files are in it
                self.folder.rmdir()
        self.close()

    def _pick(self, size: int, owner: str) -> Segment | None:
        """Return a free segment that fits; the caller has the lock."""
        fitting = [each for each in self._free.values() if _fits(each.size_bytes, size)]
        if not fitting:
            return None
        own = [each for each in fitting if owner and each.owner == owner]
        segment = min(own or fitting, key=lambda each: each.size_bytes)
        self._taken[segment.number] = self._free.pop(segment.number)
        return segment

    def _pick_or_reserve(self, size: int, owner: str) -> tuple[Segment | None, int]:
        """Return a free segment that fits, or the number of a new one that is counted already."""
        while True:
            with self._lock:
                if segment := self._pick(size, owner):
                    return segment, segment.number
                is_coming = any(o == owner and _fits(s, size) for s, o in self._coming.values())
                # Whoever makes it tells; after that long one is made beside it.
                if is_coming and self._changed.wait(_REMOVE_MAX_S):
                    continue
                if self._reserve(size):
                    number, self._next_number = self._next_number, self._next_number + 1
                    return None, number
            self._make_way()

    def _reserve_coming(self, size: int, owner: str, num_segments: int) -> int | None:
        """Count a segment that will be free; None where there are enough, or no room."""
        with self._lock:
            there = (*self._free.values(), *self._taken.values())
            sizes = [(each.size_bytes, each.owner) for each in there]
            own = [each for each, of in (*sizes, *self._coming.values()) if of == owner]
            has_room = self._total_bytes + size <= self.budget_bytes
            if not has_room or self._num_segments >= self._segments_max:
                return None
            if sum(_fits(each, size) for each in own) >= num_segments:
                return None
            self._count(size)
            number, self._next_number = self._next_number, self._next_number + 1
            self._coming[number] = (size, owner)
            return number

    def _reserve(self, size: int) -> bool:
        """Count a new segment; False where free ones are in its way. The caller has the lock."""
        used_bytes = self._total_bytes - self._spare_bytes()
        if used_bytes + size > self.budget_bytes:
            raise VaultFullError(
                f"{size >> 20} MiB do not fit: {used_bytes >> 20} of "
                f"{self.budget_bytes >> 20} MiB are in use"
            )
        num_spare = len(self._free) + len(self._leaving) + len(self._coming)
        if self._num_segments - num_spare >= self._segments_max:
            raise VaultFullError(f"all {self._segments_max} segments are in use")
        if self._total_bytes + size > self.budget_bytes or self._num_segments >= self._segments_max:
            return False
        self._count(size)
        return True

    def _make_way(self) -> bool:
        """Remove the oldest free segment, or wait for one that is being removed or made.

        Returns False where there is neither.
        """
        with self._lock:
            if not self._free:
                is_changing = bool(self._leaving or self._coming)
                return is_changing and self._changed.wait(_REMOVE_MAX_S)
            segment = self._leave(next(iter(self._free)))
        self._remove(segment)
        return True

    def _leave(self, number: int) -> Segment:
        """Give a free segment to whoever removes it; the caller has the lock."""
        segment = self._leaving[number] = self._free.pop(number)
        return segment

    def _spare_bytes(self) -> int:
        """Return what is free, about to be, or on its way out; the caller has the lock."""
        return sum(size for size, _ in self._coming.values()) + sum(
            each.size_bytes for group in (self._free, self._leaving) for each in group.values()
        )

    def _make(self, number: int, size: int) -> Segment:
        """Make a segment whose size is counted already."""
        path = self.folder / f"{SEGMENT}{number}"
        while True:
            try:
                segment = Segment(path, number, self._make_file(path, size), size)
            except OSError as error:
                # The file system is smaller than the budget, or shared.
                if error.errno == errno.ENOSPC and self._make_way():
                    continue
                with self._lock:
                    self._count(-size)
                raise VaultFullError(
                    f"{size >> 20} MiB cannot be made in {self.folder}: {error}"
                ) from error
            with self._lock:
                self._taken[number] = segment
            return segment

    def _make_file(
        self, path: Path, size: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            for begin in range(0, size, _PIECE_BYTES):
                if not is_wanted():
                    raise InterruptedError(errno.EINTR, "not wanted any more")  # noqa: TRY301
                self._allocate(file, begin, min(_PIECE_BYTES, size - begin))
        except BaseException:
            path.unlink()
            os.close(file)
            raise
        return file

    def _remove(self, segment: Segment) -> None:
        """Remove a segment's memory, then its name, then count it no more.

        Best without the lock: the memory of gigabytes takes seconds.
        """
        _meta_path(segment.path).unlink(missing_ok=True)
        _empty(segment.file, segment.size_bytes)
        segment.path.unlink(missing_ok=True)
        segment.close()
        with self._lock:
            self._leaving.pop(segment.number, None)
            self._count(-segment.size_bytes)
            self._changed.notify_all()

    def _count(self, size: int) -> None:
        """Count a segment, or with a negative size count it no more."""
        self._total_bytes += size
        self._num_segments += 1 if size > 0 else -1

    def _find(self) -> tuple[Found, ...]:
        """Open what is sealed, and remove what is not."""
        names = sorted(each.name for each in self.folder.iterdir())
        numbers = [int(match[1]) for match in map(_NAME.fullmatch, names) if match]
        found = [each for each in map(self._open, numbers) if each]
        kept = {_meta_path(each.segment.path).name for each in found}
        for name in names:
            if _LEFTOVER.fullmatch(name) and name not in kept:
                (self.folder / name).unlink()
        self._next_number = max(numbers, default=-1) + 1
        if self._total_bytes > self.budget_bytes:
            raise ArenaError(
                f"{self.folder} holds {self._total_bytes >> 20} MiB of checkpoints, more than the "
                f"budget of {self.budget_bytes >> 20} MiB; give more, or empty the folder"
            )
        return tuple(found)

    def _open(self, number: int) -> Found | None:
        path = self.folder / f"{SEGMENT}{number}"
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        status = os.fstat(file)
        text = _read_meta(_meta_path(path))
        is_whole = status.st_size > 0 and status.st_size % mmap.PAGESIZE == 0
        if text is None or not is_whole:
            _empty(file, status.st_size)
            path.unlink()
            os.close(file)
            return None
        segment = Segment(path, number, file, status.st_size)
        self._taken[number] = segment
        self._count(segment.size_bytes)
        return Found(segment, text)


def _whole_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _fits(size_bytes: int, size: int) -> bool:
    """Return whether a segment serves for a size, without too much of it left over."""
    return size <= size_bytes <= size * _WASTE_MAX


def _count_descriptors() -> int:
    """Return how many descriptors segments may take; some are left to the doors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    return limit - min(limit // 4, 4096)


def _meta_path(path: Path) -> Path:
    return path.with_name(path.name + ".meta")


def _read_meta(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > _META_BYTES_MAX:
            return None
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _empty(file: int, size: int) -> None:
    """Give back a file's memory though it is mapped elsewhere.

    To shorten the file instead would kill whoever touches its mapping.
    """
    libc = ctypes.CDLL(None)
    libc.fallocate(file, _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(size))
