"""Damaged segments: a read gives what was written, or an error that says so; never other bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from resilience.data.errors import DamagedBatchError
from resilience.data.format import (
    ENTRY_BYTES,
    HEADER_BYTES,
    PUBLISHED_OFFSET,
    TABLE_OFFSET,
    Entry,
    entry_offset,
    pack_entry,
    records_offset,
)
from resilience.data.segments import Sealer, SegmentReader, segment_path
from resilience.data.tree import flatten
from tests.resilience.data.segment_files import (
    FINGERPRINT,
    MirrorSealer,
    count_intact,
    flip,
    is_batch,
    make_batch,
    open_files,
    read,
    write,
)

SEALERS = pytest.mark.parametrize("sealer", [None, MirrorSealer()], ids=["plain", "sealed"])


USED = [
    *range(HEADER_BYTES),
    *range(PUBLISHED_OFFSET, PUBLISHED_OFFSET + 8),
    *range(TABLE_OFFSET, TABLE_OFFSET + 2 * ENTRY_BYTES),
]


def outcome(get: Callable[[], SegmentReader], number: int) -> str:
    try:
        batch = read(get(), number)
    except DamagedBatchError:
        return "damaged"
    return "right" if is_batch(batch, number) else "wrong"


@SEALERS
def test_one_wrong_bit_is_found_anywhere(tmp_path: Path, sealer: Sealer | None) -> None:
    path = write(tmp_path, 0, 1, sealer=sealer)
    used = [*USED, *range(records_offset(8), path.stat().st_size)]

    for position in used:
        flip(path, position)
        found = {
            outcome(lambda: SegmentReader.open(path, FINGERPRINT, sealer=sealer), n) for n in (0, 1)
        }
        flip(path, position)
        # Between the records there is a gap that nobody reads.
        is_padding = found == {"right"} and position >= records_offset(8)
        assert "damaged" in found or is_padding, position
        assert "wrong" not in found, position
    with SegmentReader.open(path, FINGERPRINT, sealer=sealer) as segment:
        assert count_intact(segment) == 2


@pytest.mark.parametrize(
    "position",
    [
        pytest.param(PUBLISHED_OFFSET + 1, id="count"),
        pytest.param(entry_offset(1) + 8, id="entry"),
        pytest.param(-100, id="payload"),
    ],
)
def test_one_wrong_bit_is_found_in_a_mapped_file(tmp_path: Path, position: int) -> None:
    path = write(tmp_path, 0, 1)
    with SegmentReader.open(path, FINGERPRINT) as segment:
        assert is_batch(read(segment, 1), 1)
        flip(path, position % path.stat().st_size)

        with pytest.raises(DamagedBatchError, match=r"segment-00000001.batches is damaged"):
            segment.read(1)
        if position != PUBLISHED_OFFSET + 1:
            assert is_batch(read(segment, 0), 0)
            assert count_intact(segment) == 1


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_file_that_was_cut_gives_no_wrong_batch(tmp_path: Path, is_mapped: bool) -> None:
    path = write(tmp_path, 0, 1)
    whole = path.read_bytes()
    last = records_offset(8)
    assert is_batch(read(SegmentReader.open(path, FINGERPRINT), 1), 1)

    for size in (*range(0, last, 500), *range(last, len(whole), 50), len(whole) - 1):
        path.unlink()
        path.write_bytes(whole)
        segment = SegmentReader.open(path, FINGERPRINT)
        os.truncate(path, size)

        def get(mapped: SegmentReader = segment) -> SegmentReader:
            return mapped if is_mapped else SegmentReader.open(path, FINGERPRINT)

        assert outcome(get, 1) == "damaged"
        assert outcome(get, 0) in ("damaged", "right")
        segment.close()


@pytest.mark.parametrize("content", [b"", b"\0" * 100_000, b"segment" * 10_000])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = segment_path(tmp_path, 1)
    path.write_bytes(content)
    with pytest.raises(DamagedBatchError, match="is damaged: "):
        SegmentReader.open(path, FINGERPRINT)


def test_another_fingerprint_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 0)
    num_files = open_files()
    with pytest.raises(DamagedBatchError, match="has batches of another fingerprint"):
        SegmentReader.open(path, bytes(32))
    assert open_files() == num_files


def test_a_deleted_file_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SegmentReader.open(segment_path(tmp_path, 1), FINGERPRINT)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    link = segment_path(tmp_path, 2)
    link.symlink_to(write(tmp_path, 0))
    with pytest.raises(OSError, match="symbolic links"):
        SegmentReader.open(link, FINGERPRINT)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, MirrorSealer(), "is not encrypted"),
        (MirrorSealer(), None, "is encrypted"),
        (MirrorSealer(), MirrorSealer(b"other"), "of another key"),
    ],
)
def test_a_wrong_key_is_refused(
    tmp_path: Path, before: Sealer | None, after: Sealer | None, message: str
) -> None:
    path = write(tmp_path, 0, sealer=before)
    with pytest.raises(DamagedBatchError, match=message):
        SegmentReader.open(path, FINGERPRINT, sealer=after).read(0)


def test_a_sealed_record_cannot_stand_for_another(tmp_path: Path) -> None:
    one, other = (write(tmp_path, n, serial=n, sealer=MirrorSealer()) for n in (1, 2))
    data = bytearray(one.read_bytes())
    begin = records_offset(8)
    data[begin:] = other.read_bytes()[begin:]
    data[TABLE_OFFSET : TABLE_OFFSET + ENTRY_BYTES] = forged_entry(data[begin:])
    one.write_bytes(data)

    with pytest.raises(DamagedBatchError, match="of another key"):
        SegmentReader.open(one, FINGERPRINT, sealer=MirrorSealer()).read(1)


def forged_entry(record: bytearray) -> bytes:
    description, _ = flatten(make_batch(1))
    checksum = xxhash.xxh3_64_intdigest(record)
    return pack_entry(Entry(1, records_offset(8), len(record), len(description), checksum))
