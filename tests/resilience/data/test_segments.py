"""Segments: what was appended is read, by whoever has the file, as soon as it is published."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from resilience.data.errors import CacheFolderError, CacheFullError
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


def test_a_batch_is_seen_when_it_is_published(tmp_path: Path) -> None:
    with (
        create(tmp_path, first=3) as writer,
        SegmentReader.open(writer.path, FINGERPRINT) as segment,
    ):
        assert segment.numbers == range(3, 3)
        for each in (3, 4):
            append(writer, each)
            assert segment.numbers[-1] == each
            assert is_batch(read(segment, each), each)


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
ASKED = "for line in sys.stdin: print(is_batch(read(segment, int(line)), int(line)), flush=True)"
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


def test_another_process_reads_what_is_published(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    with create(tmp_path) as writer:
        reader = start(READER + ASKED, writer.path)
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == "ready\n"
        for each in range(3):
            append(writer, each)
            print(each, file=reader.stdin, flush=True)
            assert reader.stdout.readline() == "True\n"


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
