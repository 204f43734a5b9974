"""Steps that several workers of a node print."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from resilience.agent.processes import steps as steps_module
from resilience.agent.processes.output import LineCutter
from resilience.agent.processes.steps import StepFinder
from resilience.agent.processes.worker import Worker
from resilience.comm.page import Activity, Page, create_page

PATTERNS = (r"step (?P<step>\d+)", r"loss (?P<loss>\S+)")


class Node:
    """A reader, two workers with ranks 4 and 5, and what is written."""

    def __init__(self, page: Page, connection: socket.socket, monkeypatch: Any) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(steps_module.time, "monotonic", lambda: self.now_s)
        self.page = page
        self.written: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {"page": page, "write": self._write, "start": 2}
        self.reader = StepFinder(PATTERNS, **self.options)
        self.workers = [
            Worker(number=slot, slot=slot, socket=connection, outputs={}) for slot in range(2)
        ]
        self.enter(0)

    def _write(self, event: str, *, step: int, rank: int, **fields: Any) -> None:
        assert (event, fields.pop("start")) == ("step", 2)
        self.written.append((step, rank, fields.get("loss"), fields["duration_s"]))

    def enter(self, generation: int) -> None:
        for each in self.workers:
            each.enter(4 + each.slot, generation)

    def say(self, slot: int, *lines: str, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.reader.read_lines(self.workers[slot], [line.encode() for line in lines])


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        page = Page(create_page(2), 2)
        yield Node(page, ours, monkeypatch)
        page.close()


def test_a_step_is_written_once_by_the_first_rank_that_says_it(node: Node) -> None:
    node.say(0, "step 1", "loss 3")
    node.say(1, "step 1", "loss 3")
    node.say(1, "step 2", after_s=0.5)
    node.say(0, "step 2")
    node.say(0, "step 4", after_s=1.0)
    node.reader.settle(node.now_s + 0.4)
    before = list(node.written)
    node.reader.settle(node.now_s + 0.6)

    assert before == [(1, 5, 3.0, None), (2, 4, None, 0.5)]
    assert node.written == [*before, (4, 4, None, 0.5)]


def test_a_step_whose_values_are_in_its_line_is_written_at_once(node: Node) -> None:
    node.reader = StepFinder([r"step (?P<step>\d+) loss (?P<loss>\S+)"], **node.options)
    node.say(0, "step 1 loss 3")

    assert node.written == [(1, 4, 3.0, None)]


def test_the_page_shows_each_ranks_own_steps(node: Node) -> None:
    node.say(0, "step 7")

    slot = node.page.read(0)
    assert (slot.step, slot.activity, slot.progress_s > 0) == (7, Activity.UPDATE, True)
    assert node.page.read(1).activity is Activity.NOWHERE


def test_steps_begin_anew_with_each_generation(node: Node) -> None:
    node.say(0, "step 5")
    node.reader.forget(node.workers[0])
    late = node.workers[1]
    node.workers = [
        Worker(number=3, slot=0, socket=late.socket, outputs={}),
        late,
    ]
    node.workers[0].enter(4, 1)
    node.say(0, "step 3", after_s=9.0)
    node.reader.forget(node.workers[0])
    node.say(1, "step 6")
    node.reader.forget(late)

    assert node.written == [(5, 4, None, None), (3, 4, None, None)]


def test_of_a_flood_the_newest_lines_are_looked_at(node: Node) -> None:
    """And after a second of it again."""
    node.say(0, *["noise"] * 5000, "step 1")
    node.say(0, "step 2")
    node.say(0, "step 3", after_s=1.0)
    node.reader.forget(node.workers[0])

    assert [each[0] for each in node.written] == [1, 3]


def test_search_that_takes_long_is_given_up_for_the_second(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(steps_module.time, "perf_counter", lambda: float(next(clock)))
    node.say(0, "step 1", "step 2")
    node.say(0, "step 3")
    node.say(0, "step 4", after_s=1.0)
    node.reader.forget(node.workers[0])

    assert [each[0] for each in node.written] == [1, 4]


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        ([b"one\ntwo"], [b"one"], [b"two"]),
        ([b"\r 1%\r 2%\r 3%"], [b"", b" 1%", b" 2%"], [b" 3%"]),
        ([b"dos\r\n", b"line\r", b"\nend"], [b"dos", b"line"], [b"end"]),
        ([b"bar\r", b"next"], [b"bar"], [b"next"]),
    ],
)
def test_bar_that_returns_to_its_begin_ends_a_line(
    pieces: list[bytes], lines: list[bytes], rest: list[bytes]
) -> None:
    reading, writing = os.pipe()
    cutter = LineCutter(reading)
    found = []
    for piece in pieces:
        os.write(writing, piece)
        found += cutter.read()[0]

    assert found == lines
    os.close(writing)
    assert cutter.drain() == rest
