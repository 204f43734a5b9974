"""What waits, what is dropped and what is said of it, where a destination takes nothing."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.agent.processes.output import EventQueue, Output, WorkerStream
from resilience.agent.processes.writer import Backlog, Piece, Writer
from resilience.events import read_events
from tests.disks import make_full_file

LIMIT_BYTES = 40


def piece(file: str, first: int, num_lines: int, *, is_kept: bool) -> Piece:
    """Return lines that are numbered from `first` on, five bytes each."""
    lines = b"".join(b"%04d\n" % number for number in range(first, first + num_lines))
    return Piece(file=file, lines=lines, is_kept=is_kept)


class Course:
    """A backlog, what was given to it and what came out of it."""

    def __init__(self) -> None:
        self.backlog = Backlog(LIMIT_BYTES)
        self.written: list[Piece] = []
        self.in_hand: Piece | None = None
        self.numbers: dict[tuple[str, bool], int] = defaultdict(int)
        """How many lines were given, by file and whether they are kept."""

    def add(self, file: str, num_lines: int, *, is_kept: bool) -> None:
        first = self.numbers[file, is_kept]
        self.numbers[file, is_kept] += num_lines
        self.backlog.add(piece(file, first, num_lines, is_kept=is_kept))

    def write(self) -> None:
        """Take a piece, as the thread does, or end the writing of the one that was taken."""
        if self.in_hand is None:
            self.in_hand = self.backlog.take()
        else:
            self.written.append(self.in_hand)
            self.backlog.settle(self.in_hand)
            self.in_hand = None

    def end(self) -> None:
        while self.backlog.has_more or self.in_hand:
            self.write()


ADDS = st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.booleans())


@given(st.lists(ADDS | st.just("write"), max_size=60))
def test_each_line_is_written_or_counted_in_its_place(steps):
    course = Course()
    for step in steps:
        if step == "write":
            course.write()
        else:
            file, num_lines, is_kept = step
            course.add(file, num_lines, is_kept=is_kept)
    course.end()

    for file in "ab":
        mine = [each for each in course.written if each.file == file]
        kept = b"".join(each.lines for each in mine if each.is_kept and not each.num_dropped)
        assert kept == piece("", 0, course.numbers[file, True], is_kept=True).lines
        place = 0
        for each in (each for each in mine if each.num_dropped or not each.is_kept):
            place += each.num_dropped
            for line in each.lines.splitlines():
                assert int(line) == place
                place += 1
        assert place == course.numbers[file, False]
    assert course.backlog.num_lines == 0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)) | st.just("write")))
def test_no_more_than_the_limit_waits_of_what_may_be_dropped(steps):
    course = Course()
    for step in steps:
        if step == "write":
            course.write()
        else:
            course.add(*step, is_kept=False)

        assert course.backlog.num_lines * 5 <= LIMIT_BYTES


def test_gap_ends_where_the_destination_takes_something_again():
    course = Course()
    for _ in range(4):
        course.add("a", 3, is_kept=False)
    course.write()
    course.write()
    course.add("a", 1, is_kept=False)
    course.write()
    course.write()
    course.write()
    course.write()
    course.add("a", 1, is_kept=False)
    course.end()

    assert [each.num_dropped or len(each.lines) // 5 for each in course.written] == [3, 3, 7, 1]


def test_writer_whose_destination_hangs_takes_everything_and_writes_it_later():
    reader, end = os.pipe()
    filling = b"\n" * (1 << 16)
    os.write(end, filling)

    def write(each: Piece) -> None:
        text = each.lines or b"%d left out\n" % each.num_dropped
        while text:
            text = text[os.write(end, text) :]

    writer = Writer(write, limit_bytes=1 << 17)
    lines = b"".join(b"%07d\n" % number for number in range(1 << 10))
    for _ in range(40):
        writer.put(Piece(lines=lines, is_kept=False))
    writer.put(Piece(lines=b"the end\n"))

    assert writer.close(time.monotonic()) == (16 << 10) + 1
    found = b""
    while not found.endswith(b"the end\n"):
        found += os.read(reader, 1 << 20)
    assert found == filling + lines * 16 + b"%d left out\n" % (24 << 10) + b"the end\n"
    assert writer.close(time.monotonic() + 60) == 0
    os.close(reader)
    os.close(end)


def test_log_that_hangs_says_how_many_lines_it_lacks(tmp_path: Path, capfd) -> None:
    """A FIFO stands in its place; the log of another rank waits behind it."""
    output = Output(tmp_path / "events.jsonl", tmp_path / "logs", "n0")
    fifo = tmp_path / "logs" / "rank-0.generation-3.log"
    os.mkfifo(fifo)
    word = b"x" * 999
    for number in range(20_000):
        output.write(0, 3, [b"%05d %s" % (number, word)], WorkerStream.OUTPUT)
    output.write(1, 3, [b"another"], WorkerStream.ERRORS)
    written: list[str] = []
    with fifo.open() as file:
        while not (notice := file.readline()).startswith("resilience.agent: "):
            written.append(notice)
        output.write(0, 3, [b"the end"], WorkerStream.OUTPUT)
        last = file.readline()
    output.close(60.0)

    assert [int(each[:5]) for each in written] == list(range(len(written)))
    num_dropped = 20_000 - len(written)
    assert notice == (
        f"resilience.agent: {num_dropped} lines of workers are left out here: the file took "
        "nothing for too long\n"
    )
    assert last == "the end\n"
    said = capfd.readouterr().err
    assert f"in {fifo} {num_dropped} lines of workers are left out here" in said
    assert "[n0 rank 1] another" in said


def test_events_that_could_not_be_written_are_counted_in_the_last_words(tmp_path: Path, capfd):
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    file = os.open(path, os.O_RDWR)
    os.write(file, b"\n" * (1 << 16))
    output = Output(path, tmp_path / "logs", "n0")
    log = output.open_log()
    for number in range(3):
        log.write("generation_opened", number=number)

    output.close(0.1)

    said = capfd.readouterr().err
    assert f"resilience.agent n0: 3 events are lost: {tmp_path} took none of them\n" in said
    # Its thread can end now.
    found = b""
    while found.count(b"generation_opened") < 3:
        found += os.read(file, 1 << 20)
    os.close(file)


def test_events_of_an_agent_are_written_in_their_order(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    output = Output(path, tmp_path / "logs", "n0")
    log = output.open_log()
    for number in range(500):
        log.enter(number)
        log.write("generation_opened")

    output.close(60.0)

    assert [each.generation for each in read_events(path)] == list(range(500))


@pytest.mark.parametrize("is_mended", [True, False])
def test_events_wait_where_the_disk_is_full(is_mended: bool, tmp_path: Path):
    """Also for a file that is another one by then."""
    path, words, has_complained = tmp_path / "events.jsonl", [], threading.Event()
    make_full_file(path)

    def complain(text: str) -> None:
        words.append(text)
        has_complained.set()

    queue = EventQueue(path, complain)
    for number in range(3):
        queue.append(b"%d\n" % number)
    assert has_complained.wait(30)
    path.unlink()
    if is_mended:
        path.touch()

    assert queue.close(time.monotonic() + 30) == (0 if is_mended else 3)

    (said,) = words
    assert said == (
        f"cannot write events to {path}: No space left on device; "
        "the run goes on, and its events wait in memory"
    )
    if is_mended:
        assert path.read_text() == "0\n1\n2\n"
