"""What the coordinator decides where a run does not recover."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resilience.agent.coordination.coordinator import take_over
from resilience.agent.coordination.events import Said, Tick
from resilience.agent.coordination.membership import Stage, State
from resilience.agent.coordination.standing import Standing
from resilience.comm.messages import GAVE_UP_STATUS, End, Failed
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    broken,
    ends,
    finished,
    join,
    layout,
    lost,
    opened,
    phases,
    places,
    play,
    running,
)

NO_RECOVERY = replace(OPTIONS, recovers=False, restarts_max=2)
AGAIN = "; the 2 restarts that trainer.max_restarts allows are used up"
ONCE = "; the 1 restart that trainer.max_restarts allows is used up"


def died(rank: int, generation: int = 0, status: int = 7) -> Said:
    failed = Failed(
        generation=generation, rank=rank, reason="died", text=f"rank {rank} died", status=status
    )
    return Said(node=f"n{rank // 2}", message=failed)


def afresh(generation: int = 0) -> list[Said]:
    return places(0, 1, generation=generation, step=None)


def test_next_generation_opens_when_all_workers_are_fresh() -> None:
    state, actions = play(running(NO_RECOVERY), died(3))
    assert (state.stage, broken(actions)) == (Stage.STOPPING, ["n0", "n1"])
    state, actions = play(state, *afresh()[:3])
    assert opened(actions) == []

    state, actions = play(state, afresh()[3])

    assert (state.stage, state.generation) == (Stage.RUNNING, 1)
    assert phases(opened(actions)[0]) == ["fresh"] * 4


def test_restarts_are_counted_over_all_ranks() -> None:
    """Whatever follows from a fault is no restart of its own."""
    state = running(NO_RECOVERY)
    for number in range(2):
        state, _ = play(state, died(number, number), died(number + 1, number), *afresh(number))
        assert (state.stage, state.generation) == (Stage.RUNNING, number + 1)

    state, actions = play(state, died(2, 2), now_s=1e6)

    assert ends(actions) == [End(status=7, reason=f"rank 2 died{AGAIN}")] * 2
    assert broken(actions) == []


def test_status_is_that_of_the_first_worker_that_failed() -> None:
    _, actions = play(running(replace(NO_RECOVERY, restarts_max=0)), died(1, status=137))

    assert ends(actions) == [End(status=137, reason="rank 1 died")] * 2


def test_lost_node_takes_its_place_again_when_it_comes_back() -> None:
    state, actions = play(running(NO_RECOVERY), lost("n1"), *afresh()[:2])
    assert (broken(actions), opened(actions)) == (["n0"], [])

    state, actions = play(state, join("n1"), now_s=100.0)

    assert (state.generation, opened(actions)[0].layout.nodes) == (1, ("n0", "n1"))


def test_lost_node_that_does_not_come_back_ends_the_run() -> None:
    state, _ = play(running(NO_RECOVERY), lost("n1"), *afresh()[:2])

    _, actions = play(state, Tick(), now_s=135.0)

    assert ends(actions) == [
        End(
            status=GAVE_UP_STATUS,
            reason="no node took the place of lost n1 within 135 s; start it again",
        )
    ]


@pytest.mark.parametrize(("allowed", "more"), [(0, ""), (1, ONCE)], ids=["none", "used-up"])
def test_lost_node_without_a_restart_left_ends_the_run_at_once(allowed: int, more: str) -> None:
    state = running(replace(NO_RECOVERY, restarts_max=allowed))
    for number in range(allowed):
        state, _ = play(state, died(0, number), *afresh(number))

    _, actions = play(state, lost("n1"))

    assert ends(actions) == [End(status=1, reason=f"n1 with ranks 2 to 3 is gone{more}")]


def test_rank_that_ended_well_is_needed_once_more_after_a_fault() -> None:
    state, _ = play(running(NO_RECOVERY), finished("n0", 0), died(3), *afresh())

    state, actions = play(state, *(finished(f"n{rank // 2}", rank, 1) for rank in range(3)))
    assert ends(actions) == []
    _, actions = play(state, finished("n1", 3, 1))

    assert ends(actions) == [End(status=0, reason="all ranks have finished")] * 2


@pytest.mark.parametrize(("generation", "opens"), [(1, True), (2, False)])
def test_successor_knows_how_often_the_workers_were_started(generation: int, opens: bool) -> None:
    state = take_over(
        NO_RECOVERY,
        Standing(generation=generation, opened=generation, layout=layout("n0", "n1")),
        lost="n0",
        now_s=0.0,
    )

    state, actions = play(
        state,
        join("n1", generation, ["n0", "n1"]),
        join("n0"),
        *afresh(generation)[2:],
    )

    assert bool(opened(actions)) == opens
    if not opens:
        assert ends(actions)[0] == End(status=1, reason=f"the coordinator was lost{AGAIN}")


def test_nothing_ends_a_run_that_has_not_begun() -> None:
    state = State(options=replace(NO_RECOVERY, restarts_max=0))

    _, actions = play(state, join("n0"), join("n1"))

    assert [each.generation for each in opened(actions)] == [0, 0]
