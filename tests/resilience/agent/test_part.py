"""What a node holds of the newest generation, and whether it is still what was told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resilience.agent.part import NodePart
from resilience.comm.messages import Learn, Message, Open, Stopped
from resilience.events import EventLog
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase, Report, fresh_report


def layout(*nodes: str) -> Layout:
    return make_layout(nodes=nodes, num_local_ranks=1)


MEMBERS = layout("n0", "n1")
FRESH = fresh_report(MEMBERS, 0, 4)
HELD = Report(rank=0, node="n0", generation=4, phase=Phase.COMPUTING, step=9, member_generation=4)


def opening(generation: int, own: Report = FRESH, members: Layout = MEMBERS) -> Open:
    reports = (own.to_json(), fresh_report(members, 1, generation - 1).to_json())
    return Open(
        generation=generation, rank=0, local_rank=0, layout=members, store="", reports=reports
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
        pytest.param(4, layout("n2", "n0"), False, id="another-place"),
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
