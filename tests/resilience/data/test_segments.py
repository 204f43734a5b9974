"""Segments: what was appended is read, by whoever has the file, as soon as it is published."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from resilience.data.errors import CacheFolderError, CacheFullError, DamagedBatchError
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
from resilience.data.segments import (
    Sealer,
    SegmentReader,
    SegmentWriter,
    remove_partial,
    segment_path,
)
from resilience.data.tree import flatten
from tests.resilience.data.scene import run_script
from tests.resilience.data.segment_files import (
    FINGERPRINT,
    LIMIT_S,
    MirrorSealer,
    append,
    count_intact,
    create,
    flip,
    is_batch,
    make_batch,
    open_files,
    read,
    write,
)

SEALERS = pytest.mark.parametrize("sealer", [None, MirrorSealer()], ids=["plain", "sealed"])


@SEALERS
def test_what_was_appended_is_read(tmp_path: Path, sealer: Sealer | None) -> None:
    """As many as there is room for."""
    path = write(tmp_path, *range(5, 13), sealer=sealer)

    with SegmentReader.open(path, FINGERPRINT, sealer=sealer) as segment:
        assert (segment.serial, segment.first, segment.numbers) == (1, 5, range(5, 13))
        assert all(is_batch(read(segment, each), each) for each in (7, 5, 12, 5))
        assert count_intact(segment) == 8
        for missing in (4, 13):
            with pytest.raises(KeyError, match=f"batch {missing} is not in segment-00000001"):
                segment.read(missing)


@pytest.mark.parametrize("batch", [None, [], 7, {"x": torch.empty(0)}, "text", [torch.ones(())]])
def test_small_batches(tmp_path: Path, batch: object) -> None:
    with SegmentWriter.create(
        tmp_path, 1, 0, FINGERPRINT, num_entries=3, num_bytes=1 << 14
    ) as writer:
        assert all(writer.append(each, *flatten(batch)) for each in range(3))

    with SegmentReader.open(writer.path, FINGERPRINT) as segment:
        assert [repr(read(segment, each)) for each in range(3)] == [repr(batch)] * 3


def test_tensors_lie_at_multiples_of_64(tmp_path: Path) -> None:
    with SegmentReader.open(write(tmp_path, 0, 1), FINGERPRINT) as segment:
        batch = read(segment, 1)
        assert [batch[each].data_ptr() % 64 for each in ("tokens", "scale")] == [0, 0]


def test_a_segment_that_is_full_takes_no_more(tmp_path: Path) -> None:
    with create(tmp_path, room=2) as writer:
        append(writer, 0, 1)
        assert not writer.append(2, *flatten(make_batch(2)))
        with pytest.raises(ValueError, match="batch 1 after 2 from 0 on"):
            writer.append(1, *flatten(make_batch(1)))
    with SegmentReader.open(writer.path, FINGERPRINT) as segment:
        assert segment.numbers == range(2)

    with create(tmp_path, serial=2, room=2) as writer:
        assert not writer.append(0, *flatten(torch.zeros(10_000)))
        append(writer, 0)


def test_the_file_is_allocated_and_shrinks_to_what_is_used(tmp_path: Path) -> None:
    writer = create(tmp_path)
    status = writer.path.stat()
    assert status.st_size == writer.num_bytes <= status.st_blocks * 512
    assert status.st_mode & 0o777 == 0o600
    append(writer, 0)
    writer.close()
    writer.close()

    assert writer.num_bytes == writer.path.stat().st_size < status.st_size
    assert os.listdir(tmp_path) == ["segment-00000001.batches"]  # noqa: PTH208


def test_a_serial_is_given_once(tmp_path: Path) -> None:
    write(tmp_path, 0)
    with pytest.raises(FileExistsError):
        create(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheFolderError, match="gone: No such file or directory; give a folder"):
        create(tmp_path / "gone")


def test_what_a_reader_writes_reaches_nobody(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 1)
    before = path.read_bytes()
    with (
        SegmentReader.open(path, FINGERPRINT) as one,
        SegmentReader.open(path, FINGERPRINT) as other,
    ):
        mine = read(one, 0)
        mine["tokens"].fill_(-1)
        mine["mask"][:] = True

        assert is_batch(read(other, 0), 0)
        assert path.read_bytes() == before
        # Who has changed its copy gets the true one again, and keeps what it has.
        assert is_batch(read(one, 0), 0)
        assert is_batch(read(one, 1), 1)
        assert mine["tokens"].eq(-1).all()


def test_a_reader_that_writes_still_sees_what_comes(tmp_path: Path) -> None:
    with (
        create(tmp_path, room=30) as writer,
        SegmentReader.open(writer.path, FINGERPRINT) as segment,
    ):
        for each in range(30):
            append(writer, each)
            batch = read(segment, each)
            assert is_batch(batch, each)
            batch["tokens"].zero_()


def test_a_deleted_file_stays_readable_for_who_has_it(tmp_path: Path) -> None:
    segment = SegmentReader.open(write(tmp_path, 0, 1), FINGERPRINT)
    batch = read(segment, 0)
    segment.path.unlink()

    assert is_batch(read(segment, 1), 1)
    batch["tokens"].zero_()
    assert is_batch(read(segment, 0), 0)
    batch = read(segment, 0)
    segment.close()
    assert is_batch(batch, 0)


def test_nothing_stays_open(tmp_path: Path) -> None:
    num_files = open_files()
    path = write(tmp_path, 0)
    SegmentReader.open(path, FINGERPRINT).close()
    with SegmentReader.open(path, FINGERPRINT) as segment:
        batch = read(segment, 0)
    # A mapping is held by its tensors, and its descriptor with it.
    assert open_files() == num_files + 1
    del batch
    assert open_files() == num_files


READER = """
import sys
from pathlib import Path
from resilience.data.segments import SegmentReader
from tests.resilience.data.segment_files import FINGERPRINT, is_batch, read
segment = SegmentReader.open(Path(sys.argv[1]), FINGERPRINT)
print("ready", flush=True)
"""
WATCHING = """
remap = segment.remap
def count(): raise SystemExit("a batch was seen before it was whole")
segment.remap = count
seen = 0
while seen < 2000:
    for number in range(seen, segment.published()):
        assert is_batch(read(segment, number), number)
        seen = number + 1
print(seen)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> subprocess.Popen[str]:
        process = run_script(program, *map(str, arguments))
        started.append(process)
        return process

    yield start
    for each in started:
        each.kill()
        each.communicate(timeout=LIMIT_S)


def test_another_process_never_sees_half_a_batch(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    with create(tmp_path, room=2000) as writer:
        reader = start(READER + WATCHING, writer.path)
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        append(writer, *range(2000))
        assert reader.communicate(timeout=LIMIT_S)[0] == "2000\n"


KILLED = """
import os, signal, sys
from pathlib import Path
from resilience.data import segments
from tests.resilience.data.segment_files import append, create
folder = Path(sys.argv[1])
append(create(folder), 0, 1)
allocate = segments._allocate
def die(*arguments):
    allocate(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
segments._allocate = die
create(folder, serial=2)
"""


def test_a_killed_writer_leaves_whole_batches(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    assert start(KILLED, tmp_path).wait(LIMIT_S) == -signal.SIGKILL

    remove_partial(tmp_path)
    assert os.listdir(tmp_path) == ["segment-00000001.batches"]  # noqa: PTH208
    with SegmentReader.open(segment_path(tmp_path, 1), FINGERPRINT) as segment:
        assert count_intact(segment) == 2
        allocated = segment.num_bytes
        segment.trim()
        assert segment.num_bytes < allocated
        assert all(is_batch(read(segment, each), each) for each in (0, 1))


@pytest.mark.parametrize(
    ("num_entries", "num_bytes", "fingerprint"),
    [(0, 10**5, FINGERPRINT), (2, 8192, FINGERPRINT), (2, 10**5, b"short")],
)
def test_what_makes_no_segment_is_refused(
    tmp_path: Path, num_entries: int, num_bytes: int, fingerprint: bytes
) -> None:
    with pytest.raises(ValueError, match=r"^(a segment|a fingerprint|\d+ bytes)"):
        SegmentWriter.create(
            tmp_path, 1, 0, fingerprint, num_entries=num_entries, num_bytes=num_bytes
        )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_costs_the_batch_or_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "full")

    with create(tmp_path) as writer:
        append(writer, 0)
        num_files = open_files()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            patch.setattr(os, "posix_fallocate", fail)
            for write_more in (
                lambda: writer.append(1, *flatten(make_batch(1))),
                lambda: create(tmp_path, serial=2),
            ):
                with pytest.raises(CacheFullError, match="No space left on device; make the file"):
                    write_more()
        assert open_files() == num_files
        assert list(tmp_path.iterdir()) == [writer.path]
        append(writer, 1)
    with SegmentReader.open(writer.path, FINGERPRINT) as segment:
        assert count_intact(segment) == 2


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
        # The gap between two records is never read.
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
