"""Which workers are held to a deadline. What follows is shown on real processes elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from resilience.agent import deadlines as deadlines_module
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
    head="",
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
    crew = make_crew(ranks={0: worker})
    make(crew, said, is_member=is_member, reports=reports).check(waited_s)
    return said


def make_crew(**changes: object) -> SimpleNamespace:
    """Return a node's processes, of which none is without a rank."""
    content = {"ranks": {}, "is_whole": True, "coming": [], "pool": make_pool()} | changes
    return SimpleNamespace(**content)


def make_pool(
    workers: Mapping[int, object] = EMPTY,
    state: Callable[[], str] = lambda: "S",
    kill: Callable[[], None] = lambda: None,
) -> SimpleNamespace:
    return SimpleNamespace(workers=workers, zygote=SimpleNamespace(state=state, kill=kill))


def make(
    crew: SimpleNamespace,
    said: list[str],
    *,
    is_member: bool = True,
    reports: Mapping[int, None] = EMPTY,
) -> Deadlines:
    """Return what holds a node to deadlines, with its workers in a generation that has ended."""
    part = SimpleNamespace(
        is_broken=True,
        is_member=is_member,
        broken_s=0.0,
        rank=lambda local_rank: local_rank,
        reports=reports,
        warn=said.append,
    )
    options = SimpleNamespace(
        hang_deadline_s=300.0, coordinator=Options(num_nodes=1, num_local_ranks=1)
    )
    return Deadlines(
        cast(Crew, crew),
        cast(NodePart, part),
        cast(Page, None),
        options=cast(AgentOptions, options),
        say=said.append,
        leave=said.append,
    )


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


@pytest.mark.parametrize(
    ("slowest_s", "deadline_s"),
    [
        pytest.param(None, 52.5, id="half-of-what-joining-is-longer-than-stopping"),
        pytest.param(30.0, 52.5, id="other-starts-were-faster"),
        pytest.param(80.0, 80.0, id="another-start-was-slower"),
    ],
)
def test_start_that_a_rank_waits_for_has_a_deadline(
    worker: Worker, slowest_s: float | None, deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of 120 s to join, and 15 s to stop."""
    said: list[str] = []
    deadlines = make(make_crew(ranks={0: None}, is_whole=False, coming=[worker]), said)
    if slowest_s is not None:
        clock = SimpleNamespace(monotonic=lambda: 1000.0 + slowest_s)
        monkeypatch.setattr(deadlines_module, "time", clock)
        deadlines.note_ready(
            Worker(number=2, slot=1, socket=worker.socket, outputs={}, wanted_s=1000.0)
        )
    worker.wanted_s = 0.0

    deadlines.check(deadline_s - 0.1)
    assert (said, worker.is_condemned) == ([], False)
    deadlines.check(deadline_s)

    assert said == [f"process -1 was not ready within {deadline_s:g} s of its start"]
    assert worker.is_condemned


@pytest.mark.parametrize(("is_member", "owns", "is_replaced"), [
    pytest.param(True, False, True, id="spare"),
    pytest.param(False, True, True, id="of-a-standby-node"),
    pytest.param(True, True, False, id="a-rank-has-a-longer-deadline"),
])  # fmt: skip
def test_process_without_a_rank_that_is_stopped_is_replaced(
    is_member: bool, owns: bool, is_replaced: bool
) -> None:
    said: list[str] = []
    process = SimpleNamespace(pid=7, is_condemned=False, state=lambda: "T")
    process.condemn = lambda number: setattr(process, "is_condemned", True)
    crew = make_crew(pool=make_pool(workers={1: process}), owns=lambda worker: owns)
    deadlines = make(crew, said, is_member=is_member)

    seen = [(second, process.is_condemned) for second in range(10)
            if deadlines.check_idle(float(second)) is None]  # fmt: skip

    assert [second for second, is_gone in seen if is_gone] == ([5, 6, 7, 8, 9] * is_replaced)
    text = "process 7, which has no rank, has been stopped (state T) for 5 s; another one takes "
    assert said == [f"{text}its place"] * is_replaced


def test_stopped_process_that_forks_workers_is_replaced_too() -> None:
    said: list[str] = []
    killed: list[str] = []
    state = {"letter": "T"}

    def kill() -> None:
        killed.append("zygote")
        state["letter"] = "Z"

    pool = make_pool(state=lambda: state["letter"], kill=kill)
    deadlines = make(make_crew(pool=pool), said)

    for second in range(10):
        deadlines.check_idle(float(second))

    assert (killed, len(said)) == (["zygote"], 1)
    assert said[0].startswith("the process that forks workers has been stopped (state T) for 5 s")


def test_processes_that_were_stopped_with_their_agent_get_their_time() -> None:
    said: list[str] = []
    deadlines = make(make_crew(pool=make_pool(state=lambda: "T")), said)

    for second in (0, 1, 2, 3, 60, 61, 64):
        deadlines.check_idle(float(second))

    assert said == []
