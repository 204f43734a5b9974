"""The page of shared memory in which workers show where they are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.comm.page import Activity, Page, create_page

NUM_SLOTS = 3


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = create_page(NUM_SLOTS)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def page(file: int) -> Iterator[Page]:
    each = Page(file, NUM_SLOTS)
    yield each
    each.close()


def test_mark_and_beat_show_what_they_were_given(page: Page) -> None:
    before_s = time.monotonic()
    page.mark(1, 123_456_789, Activity.GATE, 17)
    page.beat(1)

    slot = page.read(1)

    assert (slot.step, slot.activity, slot.micro_batch) == (123_456_789, Activity.GATE, 17)
    assert before_s <= slot.progress_s <= slot.beat_s <= time.monotonic()
    assert page.read(0).activity is page.read(2).activity is Activity.NOWHERE


def test_micro_batches_beyond_the_field_do_not_touch_the_place(page: Page) -> None:
    page.mark(0, 1, Activity.FORWARD, 1 << 20)

    slot = page.read(0)

    assert (slot.step, slot.activity, slot.micro_batch) == (1, Activity.FORWARD, 0xFFFF)


def test_agents_word_is_for_one_worker(page: Page) -> None:
    page.ask_to_end(1)

    assert [page.is_asked_to_end(slot) for slot in range(NUM_SLOTS)] == [False, True, False]
    assert page.read(1) == page.read(0)


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS])
def test_slot_that_there_is_none_of_is_not_another_workers(page: Page, slot: int) -> None:
    with pytest.raises(IndexError, match=f"slot {slot} of 3"):
        page.beat(slot)


def test_cleared_slot_shows_nothing(page: Page) -> None:
    page.mark(0, 7, Activity.UPDATE)
    page.beat(0)
    page.ask_to_end(0)

    page.clear(0)

    slot = page.read(0)
    assert (slot.beat_s, slot.progress_s, slot.activity) == (0, 0, Activity.NOWHERE)
    assert not page.is_asked_to_end(0)


def test_page_has_no_name_and_ends_with_its_last_owner() -> None:
    file = create_page(NUM_SLOTS)

    assert "memfd:" in str(Path(f"/proc/self/fd/{file}").readlink())
    os.close(file)


@contextmanager
def writing(file: int, marks: Sequence[tuple[int, Activity, int]]) -> Iterator[None]:
    """Have another process write its place, until it is ended in the middle of that."""
    writer = os.fork()
    if not writer:
        mine = Page(file, NUM_SLOTS)
        while True:
            for mark in marks:
                mine.beat(0)
                mine.mark(0, *mark)
    try:
        yield
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


def test_reader_never_sees_half_a_word(file: int, page: Page) -> None:
    marks = [(0, Activity.NOWHERE, 0), ((1 << 40) - 1, Activity.RECOVERY, 0xFFFF)]

    with writing(file, marks):
        seen = [page.read(0) for _ in range(100_000)]

    assert {(each.step, each.activity) for each in seen} <= {mark[:2] for mark in marks}
    assert {each.micro_batch for each in seen} <= {0, 0xFFFF}


def test_a_time_that_is_written_again_is_never_seen_as_none(file: int, page: Page) -> None:
    """A healthy rank, seen in the midst of a mark, once counted as hung since the machine began."""
    page.beat(0)
    page.mark(0, 1, Activity.FORWARD)

    with writing(file, [(1, Activity.BACKWARD, 0)]):
        seen = [page.read(0) for _ in range(200_000)]

    assert min(slot.beat_s for slot in seen) > 0
    assert min(slot.progress_s for slot in seen) > 0
