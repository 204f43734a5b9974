"""What a node holds of the newest generation, and whether it is still what was told of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resilience.agent.part import NodePart
from resilience.agent.processes.worker import Worker
from resilience.comm.messages import Break, Learn, LineReader, Message, Open, Stopped
from resilience.events import EventLog
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase, Report, fresh_report, pack_reports


def layout(*nodes: str) -> Layout:
    return make_layout(nodes=nodes, num_local_ranks=1)


MEMBERS = layout("n0", "n1")
FRESH = fresh_report(MEMBERS, 0, 4)
HELD = Report(rank=0, node="n0", generation=4, phase=Phase.COMPUTING, step=9, member_generation=4)

ENTERED, PASSED = (replace(HELD, phase=each) for each in (Phase.ENTERED, Phase.PASSED))


def opening(generation: int, own: Report = FRESH, members: Layout = MEMBERS) -> Open:
    reports = pack_reports([own, fresh_report(members, 1, generation - 1)], members)
    return Open(
        generation=generation, rank=0, local_rank=0, layout=members, head="", reports=reports
    )


def stopped(report: Report, generation: int = 4) -> Stopped:
    return Stopped(generation=generation, rank=0, report=report.to_json())


@pytest.fixture
def part(tmp_path: Path) -> Iterator[NodePart]:
    """A member of generation 4."""
    events = EventLog(tmp_path / "events.jsonl", node="n0", rank=None, generation=-1)
    told: list[Message] = []
    each = NodePart("n0", "", tell=told.append, say=lambda text: None, events=events)
    each.open(opening(4))
    yield each
    events.close()


@pytest.mark.parametrize(
    ("told", "opened", "has_lost"),
    [
        pytest.param(HELD, HELD, False, id="as-it-was-told"),
        pytest.param(FRESH, HELD, True, id="replaced-since"),
        pytest.param(None, HELD, True, id="never-told"),
        pytest.param(FRESH, FRESH, False, id="counted-as-fresh"),
        pytest.param(ENTERED, PASSED, False, id="another-rank-had-passed-the-gate"),
    ],
)
def test_generation_may_not_count_on_a_process_that_is_gone(
    part: NodePart, told: Report | None, opened: Report, has_lost: bool
) -> None:
    if told:
        part.report(stopped(told))

    part.open(opening(5, opened))

    assert part.has_lost(0) == has_lost


@pytest.mark.parametrize("opened", [4, 6])
def test_workers_leave_the_generation_that_they_are_in(part: NodePart, opened: int) -> None:
    """Whichever began since: a break of another one reaches nobody."""
    part.learn(Learn(generation=6, layout=layout("n1", "n2"), opened=opened, shares_folder=True))

    assert part.own_break("over").generation == 4


@pytest.mark.parametrize(
    ("opened", "members", "holds"),
    [
        pytest.param(4, layout("n0", "n2"), True, id="none-has-begun-since"),
        pytest.param(5, layout("n0", "n2"), False, id="one-has-begun-since"),
        pytest.param(5, layout("n2", "n1"), False, id="no-place-where-one-has-begun"),
    ],
)
def test_what_workers_hold_counts_until_a_generation_begins_without_them(
    part: NodePart, opened: int, members: Layout, holds: bool
) -> None:
    part.report(stopped(HELD))

    part.learn(Learn(generation=6, opened=opened, layout=members, shares_folder=True))

    assert part.holds_state == holds
    renewed = replace(HELD, generation=6, member_generation=6)
    assert part.reports == ({0: stopped(renewed, 6)} if holds else {})


def test_what_workers_hold_goes_with_them_to_another_place_of_the_same_shards(
    part: NodePart,
) -> None:
    part.report(stopped(HELD))

    part.learn(Learn(generation=6, opened=4, layout=layout("n2", "n0"), shares_folder=True))

    renewed = replace(HELD, generation=6, member_generation=6, rank=1, replica=1)
    assert part.reports == {1: replace(stopped(renewed, 6), rank=1)}


def test_what_workers_hold_is_nothing_where_their_node_has_other_shards(part: NodePart) -> None:
    def sharded(*nodes: str) -> Layout:
        return make_layout(nodes=nodes, num_local_ranks=1, num_shards=2)

    part.open(opening(5, members=sharded("n0", "n1")))
    part.report(stopped(replace(HELD, generation=5, member_generation=5, shard="0"), 5))

    part.learn(Learn(generation=6, opened=5, layout=sharded("n2", "n0"), shares_folder=True))

    assert not part.holds_state
    assert part.reports == {}


@pytest.mark.parametrize(("opened", "holds"), [(4, True), (5, False)])
def test_place_that_is_given_back_before_any_generation_has_begun_counts_as_before(
    part: NodePart, opened: int, holds: bool
) -> None:
    """What the workers hold was told once, and is not told by them again."""
    part.report(stopped(HELD))
    part.learn(Learn(generation=5, opened=opened, layout=layout("n2", "n1"), shares_folder=True))

    part.learn(Learn(generation=6, opened=opened, layout=MEMBERS, shares_folder=True))

    renewed = replace(HELD, generation=6, member_generation=6)
    assert part.reports == ({0: stopped(renewed, 6)} if holds else {})


@pytest.fixture
def worker() -> Iterator[Worker]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Worker(number=1, slot=0, socket=ours, outputs={}, local_rank=0)


@pytest.mark.parametrize(
    ("opened", "is_within", "is_fresh"),
    [
        pytest.param(4, True, False, id="still-to-tell"),
        pytest.param(4, False, True, id="came-since"),
        pytest.param(5, True, True, id="behind"),
    ],
)
def test_process_is_fresh_that_holds_nothing_that_counts(
    part: NodePart, worker: Worker, opened: int, is_within: bool, is_fresh: bool
) -> None:
    if is_within:
        worker.begin(opening(4))
    part.learn(Learn(generation=6, opened=opened, layout=MEMBERS, shares_folder=True))

    part.report_rest({0: worker})

    assert (0 in part.reports) == is_fresh


def test_worker_leaves_an_older_generation_before_the_next_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(number=1, slot=0, socket=ours, outputs={})
        worker.begin(opening(4))
        worker.begin(opening(6))
        worker.note_stopped(4)
        worker.note_stopped(6)
        worker.begin(opening(7))
        told = LineReader().feed(theirs.recv(1 << 16))

    assert [(type(each), getattr(each, "generation", None)) for each in told] == [
        (Open, 4),
        (Break, 4),
        (Open, 6),
        (Open, 7),
    ]
