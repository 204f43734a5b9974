"""Which workers are held to a deadline. What follows is shown on real processes elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from resilience.agent.coordination.membership import Options
from resilience.agent.deadlines import Deadlines
from resilience.agent.options import AgentOptions
from resilience.agent.part import NodePart
from resilience.agent.processes.crew import Crew
from resilience.agent.processes.worker import Worker
from resilience.comm.messages import Open
from resilience.comm.page import Page
from resilience.state.layout import make_layout

EMPTY: Mapping[int, None] = {}
OPENING = Open(
    generation=4,
    rank=0,
    local_rank=0,
    layout=make_layout(nodes=("n0",), num_local_ranks=1),
    store="",
    reports=(),
)


@pytest.fixture
def worker() -> Iterator[Worker]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Worker(number=1, slot=0, socket=ours, outputs={})


def check(
    worker: Worker, *, is_member: bool, waited_s: float, reports: Mapping[int, None] = EMPTY
) -> list[str]:
    """Return what is said of a worker whose generation ended so long ago."""
    said: list[str] = []
    crew = SimpleNamespace(ranks={0: worker}, is_whole=True, coming=[])
    part = SimpleNamespace(
        is_broken=True,
        is_member=is_member,
        broken_s=0.0,
        rank=lambda local_rank: local_rank,
        reports=reports,
    )
    options = SimpleNamespace(
        hang_deadline_s=300.0, coordinator=Options(num_nodes=1, num_local_ranks=1)
    )
    deadlines = Deadlines(
        cast(Crew, crew),
        cast(NodePart, part),
        cast(Page, None),
        options=cast(AgentOptions, options),
        say=said.append,
        leave=said.append,
    )
    deadlines.check(waited_s)
    return said


@pytest.mark.parametrize("is_member", [True, False], ids=["member", "standby"])
def test_worker_that_does_not_leave_its_generation_is_replaced(
    worker: Worker, is_member: bool
) -> None:
    """One of a node without a place as well: it may be given one at any time."""
    worker.begin(OPENING)

    assert check(worker, is_member=is_member, waited_s=14.9) == []
    assert not worker.is_condemned
    assert check(worker, is_member=is_member, waited_s=15.0) == [
        "rank 0 did not stop within 15 s; it is replaced"
    ]
    assert worker.is_condemned


def test_worker_that_has_left_its_generation_may_wait(worker: Worker) -> None:
    worker.begin(OPENING)
    worker.note_stopped(4)

    assert check(worker, is_member=True, waited_s=1000.0, reports={0: None}) == []
    assert not worker.is_condemned


def test_worker_that_has_left_an_older_generation_is_still_in_the_newer_one(
    worker: Worker,
) -> None:
    worker.begin(OPENING)
    worker.begin(replace(OPENING, generation=6))
    worker.note_stopped(4)

    assert len(check(worker, is_member=True, waited_s=15.0)) == 1
    assert worker.is_condemned


def test_rank_that_nothing_is_told_of_is_replaced_whatever_its_process_does(
    worker: Worker,
) -> None:
    assert len(check(worker, is_member=True, waited_s=15.0)) == 1
    assert worker.is_condemned
