"""Segments: files that hold many batches, written by one process and mapped by others.

The producer appends; a batch is visible from the moment the count of published ones says so, and
before that nobody reads it. A consumer maps a segment once, privately: what it writes into its
tensors reaches nobody else. Deleting a file leaves the mappings of it as they are.

Space is allocated when a file is made, so a full file system is an error then, and never a signal
to a later reader or writer.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

import xxhash

from resilience.data.errors import CacheFolderError, CacheFullError, DamagedBatchError
from resilience.data.format import (
    ENTRY_BYTES,
    PUBLISHED_OFFSET,
    TABLE_OFFSET,
    Buffer,
    Bytes,
    Entry,
    Header,
    align,
    entry_offset,
    pack_entry,
    pack_header,
    pack_published,
    record_parts,
    records_offset,
    unpack_entry,
    unpack_header,
    unpack_published,
)

_NAME = re.compile(r"segment-(\d{8,18})\.batches")
_PARTIAL_GLOBS = (".segment-*", ".state-*")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class Sealer(Protocol):
    """Encrypts and decrypts records; decrypting takes the associated bytes of the encryption."""

    def seal(self, parts: Iterable[Buffer], associated: bytes) -> bytes:
        """Return the parts, joined and encrypted."""

    def open(self, data: Buffer, associated: bytes) -> bytearray:
        """Return what was sealed; raises DamagedBatchError."""

    def is_current(self) -> bool:
        """Return whether others can open what is sealed here."""


def segment_path(folder: Path, serial: int) -> Path:
    """Return where a segment lies; of two that hold a batch, the one of a later serial counts."""
    return folder / f"segment-{serial:08d}.batches"


def parse_serial(name: str) -> int | None:
    """Return the serial of the segment that a file's name stands for; None for another file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def remove_partial(folder: Path) -> None:
    """Delete what a killed producer had not finished creating. Only for the producer."""
    for pattern in _PARTIAL_GLOBS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


class SegmentWriter(AbstractContextManager["SegmentWriter"]):
    """A segment that is being written; made by `create`. One thread; a context manager."""

    def __init__(self, file: int, path: Path, header: Header, sealer: Sealer | None) -> None:
        self.path = path
        self.first = header.first
        self.num_bytes = os.fstat(file).st_size
        """Size of the file: all that is allocated, after `close` what is used."""
        self.published = 0
        """How many batches it holds."""
        self._file = file
        self._header = header
        self._sealer = sealer
        self._end = records_offset(header.num_entries)
        self._is_open = True
        self._table = mmap.mmap(file, self._end)
        self._word = _published_word(memoryview(self._table))

    @classmethod
    def create(
        cls,
        folder: Path,
        serial: int,
        first_number: int,
        fingerprint: bytes,
        *,
        num_entries: int,
        num_bytes: int,
        sealer: Sealer | None = None,
    ) -> SegmentWriter:
        """Make a file of `num_bytes` for at most `num_entries` batches; see `file_bytes`.

        Raises CacheFullError where the file system has no room, CacheFolderError where the
        folder cannot be written to, FileExistsError for a serial that is taken.
        """
        header = Header(first_number, num_entries, fingerprint, sealer is not None)
        packed = pack_header(header)
        if num_bytes <= records_offset(num_entries):
            raise ValueError(f"{num_bytes} bytes are no room for {num_entries} batches")
        path = segment_path(folder, serial)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "this segment is there already", str(path))
        hidden = path.with_name(f".{path.name}")
        try:
            file = _allocate(hidden, num_bytes)
            try:
                os.pwrite(file, packed, 0)
                writer = cls(file, path, header, sealer)
                writer._word[0] = pack_published(0)
                hidden.rename(path)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            with suppress(OSError):
                hidden.unlink()
            raise _explain(error, path, num_bytes) from error
        return writer

    def append(self, number: int, description: bytes, arrays: Sequence[Bytes]) -> bool:
        """Store the next batch, as `flatten` returns it; False where it does not fit.

        The segment should then be closed and another begun. Raises CacheFullError or
        CacheFolderError where the file cannot be written to.
        """
        if number != self.first + self.published:
            raise ValueError(f"batch {number} after {self.published} from {self.first} on")
        if self.published == self._header.num_entries:
            return False
        parts = record_parts(description, arrays)
        if self._sealer is not None:
            parts = [self._sealer.seal(parts, _associated(self._header.fingerprint, number))]
        size = sum(len(each) for each in parts)
        offset = align(self._end)
        if offset + size > self.num_bytes:
            return False
        checksum = self._write(parts, offset)
        place = entry_offset(self.published)
        entry = Entry(number, offset, size, len(description), checksum)
        self._table[place : place + ENTRY_BYTES] = pack_entry(entry)
        self._end = offset + size
        self.published += 1
        # Last of all, and in one store: who sees the count sees the batch. On a machine that
        # orders stores otherwise, a reader that is too early finds a checksum that does not fit.
        self._word[0] = pack_published(self.published)
        return True

    def close(self) -> None:
        """Give back what is not used; a no-op the second time."""
        if not self._is_open:
            return
        self._is_open = False
        self._word.release()
        self._table.close()
        try:
            # Nobody reads behind the last batch, so no mapping of the file loses anything.
            os.ftruncate(self._file, self._end)
            self.num_bytes = self._end
        finally:
            os.close(self._file)

    def _write(self, parts: Sequence[Buffer], offset: int) -> int:
        """Write a record and return its checksum."""
        hasher = xxhash.xxh3_64()
        try:
            for part in parts:
                hasher.update(part)
                offset = _write_all(self._file, part, offset)
        except OSError as error:
            raise _explain(error, self.path, self.num_bytes) from error
        return hasher.intdigest()

    def __exit__(self, *error: object) -> None:
        self.close()


class SegmentReader(AbstractContextManager["SegmentReader"]):
    """A segment that is read; made by `open`. One thread; a context manager."""

    def __init__(self, file: int, path: Path, fingerprint: bytes, sealer: Sealer | None) -> None:
        self.path = path
        self._file = file
        self._sealer = sealer
        self.remap()
        header = self._check_header(fingerprint)
        self.first = header.first
        """Number of its first batch."""
        self.num_entries = header.num_entries
        """How many batches it can hold at most."""
        self._fingerprint = fingerprint
        self._records_offset = records_offset(header.num_entries)
        self.published()
        # The file is closed at last when nobody has the segment any more, closed or not.
        self._closer = weakref.finalize(self, os.close, file)

    @classmethod
    def open(cls, path: Path, fingerprint: bytes, *, sealer: Sealer | None = None) -> SegmentReader:
        """Map a segment.

        Raises DamagedBatchError where it is damaged or of another fingerprint, or is encrypted
        and should not be, or the reverse; FileNotFoundError where it was deleted meanwhile.
        """
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return cls(file, path, fingerprint, sealer)
        except BaseException:
            os.close(file)
            raise

    @property
    def serial(self) -> int:
        """Return the number in its name."""
        return parse_serial(self.path.name) or 0

    @property
    def num_bytes(self) -> int:
        """Return the size of the file as it is now."""
        return os.fstat(self._file).st_size

    @property
    def numbers(self) -> range:
        """Return the numbers of the batches that it holds now."""
        return range(self.first, self.first + self.published())

    def published(self) -> int:
        """Return how many batches are there now, from `first` on; raises DamagedBatchError."""
        # A file that somebody has cut would kill the process at the first touch.
        if os.lseek(self._file, 0, os.SEEK_END) < self._records_offset:
            raise DamagedBatchError(f"{self.path.name} is damaged: it has been cut")
        try:
            count = unpack_published(self._word[0])
        except ValueError as error:
            raise DamagedBatchError(f"{self.path.name} is damaged: {error}") from None
        if count > self.num_entries:
            raise DamagedBatchError(f"{self.path.name} is damaged: {count} batches are too many")
        return count

    def read(self, number: int) -> tuple[bytes, memoryview]:
        """Return a batch's description and its payload, checked, for a `TreeReader`.

        The payload is writable memory of this process alone; it stays valid as long as somebody
        has it. Raises KeyError for a batch that is not here, DamagedBatchError for one whose
        bytes are not what was written.
        """
        if not self.first <= number < self.first + self.published():
            raise KeyError(f"batch {number} is not in {self.path.name}: it has {self.numbers}")
        try:
            return self._read(number)
        except DamagedBatchError:
            # This process may have written into its copy of these pages.
            self.remap()
            return self._read(number)

    def remap(self) -> None:
        """Map the file anew, without what was written into tensors of it; these stay as they are.

        Raises DamagedBatchError for a file that is too short to be a segment.
        """
        memory = memoryview(b"")
        with suppress(ValueError):  # of an empty file
            # As long as it is at that moment: its writer may just be giving back the rest.
            memory = memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY))
        if len(memory) < TABLE_OFFSET:
            raise DamagedBatchError(f"{self.path.name} is damaged: it has {len(memory)} bytes")
        # Nobody closes the mapping: it goes with the last tensor that is a view of it.
        self._memory = memory
        self._word = _published_word(self._memory)

    def trim(self) -> None:
        """Give back what the file does not use. Only for a producer whose predecessor is dead.

        Raises DamagedBatchError where the last entry is damaged.
        """
        count = self.published()
        end = self._records_offset
        if count:
            entry = self._entry(self.first + count - 1)
            end = entry.offset + entry.num_bytes
        if end < self.num_bytes:
            os.truncate(self.path, end)

    def close(self) -> None:
        """Let the file go. Batches that were read stay valid; a no-op the second time."""
        self._closer()
        self._file = -1
        self._memory = memoryview(b"")
        self._word = self._memory

    def _read(self, number: int) -> tuple[bytes, memoryview]:
        entry = self._entry(number)
        end = entry.offset + entry.num_bytes
        if os.lseek(self._file, 0, os.SEEK_END) < end:
            raise self._damaged(number, "the file has been cut")
        record = self._memory[entry.offset : end]
        if xxhash.xxh3_64_intdigest(record) != entry.checksum:
            raise self._damaged(number, "its checksum does not fit")
        if self._sealer is not None:
            associated = _associated(self._fingerprint, number)
            record = memoryview(self._sealer.open(record, associated))
        size = entry.description_bytes
        return bytes(record[:size]), record[align(size) :]

    def _entry(self, number: int) -> Entry:
        place = entry_offset(number - self.first)
        try:
            entry = unpack_entry(self._memory[place : place + ENTRY_BYTES])
        except ValueError as error:
            raise self._damaged(number, f"in its entry {error}") from None
        end = entry.offset + entry.num_bytes
        if (
            entry.number != number
            or entry.offset < self._records_offset
            or entry.description_bytes > entry.num_bytes
            or end > len(self._memory)
        ):
            raise self._damaged(number, "it does not lie in the file")
        return entry

    def _check_header(self, fingerprint: bytes) -> Header:
        try:
            header = unpack_header(self._memory)
        except ValueError as error:
            raise DamagedBatchError(f"{self.path.name} is damaged: {error}") from None
        if header.fingerprint != fingerprint:
            raise DamagedBatchError(f"{self.path.name} has batches of another fingerprint")
        if header.is_sealed != (self._sealer is not None):
            state = "encrypted" if header.is_sealed else "not encrypted"
            raise DamagedBatchError(f"{self.path.name} is {state}, other than is asked for")
        if records_offset(header.num_entries) > len(self._memory):
            raise DamagedBatchError(f"{self.path.name} is damaged: its table is not whole")
        return header

    def _damaged(self, number: int, reason: str) -> DamagedBatchError:
        return DamagedBatchError(f"batch {number} in {self.path.name} is damaged: {reason}")

    def __exit__(self, *error: object) -> None:
        self.close()


def _published_word(memory: memoryview) -> memoryview:
    """Return the count of published batches as one number that is read and written at once."""
    return memory[PUBLISHED_OFFSET : PUBLISHED_OFFSET + 8].cast("Q")


def _allocate(path: Path, num_bytes: int) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except BaseException:
        os.close(file)
        raise
    return file


def _explain(error: OSError, path: Path, num_bytes: int) -> CacheFullError | CacheFolderError:
    reason = os.strerror(error.errno or 0)
    if error.errno in _FULL:
        return CacheFullError(
            f"no room for {num_bytes} bytes in {path.parent}: {reason}; make the file system "
            "larger, or the budget or the prefetch length smaller"
        )
    return CacheFolderError(
        f"cannot write {path.name} in {path.parent}: {reason}; give a folder that can be written to"
    )


def _write_all(file: int, part: Buffer, offset: int) -> int:
    """Write a part and return where it ends; the kernel takes at most 2 GiB at once."""
    rest = memoryview(part)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest = rest[written:]
        offset += written
    return offset


def _associated(fingerprint: bytes, number: int) -> bytes:
    """Return what an encrypted record is bound to, so that none can stand for another."""
    return fingerprint + number.to_bytes(8, "little")
