"""How a segment file is laid out: packing and checking of its header and its table. Pure.

    0            header: what the file is, whose batches it holds, its checksum
    128          published: how many entries are valid; written last
    4096         table: an entry for each batch, each with its own checksum
    next page    records: [description][padding to 64][arrays, each at a multiple of 64]

Numbers are in the machine's byte order: the files never leave the node. Each part has a checksum
(xxh3_64), and `published` is stored with its complement, so one wrong bit is found anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]

MAGIC = b"batches\n"
VERSION = 1
FINGERPRINT_BYTES = 32
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
PUBLISHED_OFFSET = 128
TABLE_OFFSET = PAGE_BYTES
NUM_ENTRIES_MAX = 2**20
SEALING_BYTES = 64
"""More than encryption adds to a record."""

_HEADER = struct.Struct(f"=8sIIQQ{FINGERPRINT_BYTES}s")
_ENTRY = struct.Struct("=QQQQQ")
_CHECKSUM = struct.Struct("=Q")
_FLAG_SEALED = 1
_COUNT_BITS = 32
_COUNT_MASK = (1 << _COUNT_BITS) - 1

HEADER_BYTES = _HEADER.size + _CHECKSUM.size
ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size


class Header(NamedTuple):
    """What is known of a segment without its batches."""

    first: int
    """Number of its first batch; the others follow one by one."""
    num_entries: int
    """How many batches its table has room for."""
    fingerprint: bytes
    is_sealed: bool
    """Its records are encrypted."""


class Entry(NamedTuple):
    """Where a batch lies in its segment."""

    number: int
    offset: int
    num_bytes: int
    description_bytes: int
    """Length of the description that the record begins with, before encryption."""
    checksum: int
    """xxh3_64 of the record as it is stored."""


def align(num_bytes: int) -> int:
    """Return the next multiple of 64."""
    return (num_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where each array begins in the payload, and the payload's size."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(align(end))
        end = offsets[-1] + size
    return offsets, end


def record_bytes(description: bytes, arrays: Sequence[Bytes], *, is_sealed: bool = False) -> int:
    """Return an upper bound of what a batch takes in a segment."""
    _, payload_bytes = layout(each.nbytes for each in arrays)
    extra_bytes = SEALING_BYTES if is_sealed else 0
    return align(align(len(description)) + payload_bytes + extra_bytes)


def record_parts(description: bytes, arrays: Sequence[Bytes]) -> list[Buffer]:
    """Return what a record consists of, with what lies between its arrays."""
    offsets, _ = layout(each.nbytes for each in arrays)
    base = align(len(description))
    parts: list[Buffer] = [description.ljust(base, b"\0")]
    end = base
    for offset, array in zip(offsets, arrays, strict=True):
        if gap := base + offset - end:
            parts.append(bytes(gap))
        if array.nbytes:
            parts.append(array.data)
        end = base + offset + array.nbytes
    return parts


def records_offset(num_entries: int) -> int:
    """Return where the records begin.

    They begin on a page of their own: a consumer that writes into its copy of a batch's page must
    still see new entries.
    """
    end = TABLE_OFFSET + num_entries * ENTRY_BYTES
    return -(-end // PAGE_BYTES) * PAGE_BYTES


def file_bytes(num_entries: int, record_bytes: int) -> int:
    """Return the size of a file for so many records of `record_bytes` each."""
    return records_offset(num_entries) + num_entries * align(record_bytes)


def pack_header(header: Header) -> bytes:
    """Return a header as it is stored, with its checksum."""
    if len(header.fingerprint) != FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint of {len(header.fingerprint)} bytes")
    if not 0 < header.num_entries <= NUM_ENTRIES_MAX:
        raise ValueError(f"a segment of {header.num_entries} batches")
    flags = _FLAG_SEALED if header.is_sealed else 0
    return _with_checksum(
        _HEADER.pack(MAGIC, VERSION, flags, header.first, header.num_entries, header.fingerprint)
    )


def unpack_header(data: Buffer) -> Header:
    """Read a header back; raises ValueError for what is none."""
    body = _without_checksum(data[:HEADER_BYTES], HEADER_BYTES)
    magic, version, flags, first, num_entries, fingerprint = _HEADER.unpack(body)
    if magic != MAGIC or version != VERSION:
        raise ValueError("it is no segment, or one of another version")
    return Header(first, num_entries, fingerprint, bool(flags & _FLAG_SEALED))


def pack_entry(entry: Entry) -> bytes:
    """Return an entry as it is stored, with its checksum."""
    return _with_checksum(_ENTRY.pack(*entry))


def unpack_entry(data: Buffer) -> Entry:
    """Read an entry back; raises ValueError for what is none."""
    return Entry._make(_ENTRY.unpack(_without_checksum(data, ENTRY_BYTES)))


def entry_offset(index: int) -> int:
    """Return where an entry of the table begins."""
    return TABLE_OFFSET + index * ENTRY_BYTES


def pack_published(count: int) -> int:
    """Return the 64-bit word that says how many entries are valid."""
    return count | (count ^ _COUNT_MASK) << _COUNT_BITS


def unpack_published(word: int) -> int:
    """Read the word back; raises ValueError for what is none."""
    count = word & _COUNT_MASK
    if (word >> _COUNT_BITS) ^ count != _COUNT_MASK:
        raise ValueError("it does not say how many batches it holds")
    return count


def _with_checksum(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _without_checksum(data: Buffer, num_bytes: int) -> Buffer:
    """Return what a checksum covers; raises ValueError where it is not what it covers."""
    body_bytes = num_bytes - _CHECKSUM.size
    body = data[:body_bytes]
    if len(data) != num_bytes or (
        _CHECKSUM.unpack_from(data, body_bytes)[0] != xxhash.xxh3_64_intdigest(body)
    ):
        raise ValueError("a checksum does not fit")
    return body
