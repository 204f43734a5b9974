"""What the coordinator does before it gives up: it has the ranks save, within a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.coordinator import decide
from resilience.agent.coordination.membership import ENDED, RUNNING, Action, Note, State, Tick
from resilience.comm.messages import GAVE_UP_STATUS
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    ends,
    failed,
    finished,
    join,
    lost,
    opened,
    places,
    play,
    running,
)

TELLS: dict[str, Any] = {"saved": 4, "place": "/run/state"}
WHY = (
    "1 faults without a committed step between them, allowed are 0 "
    "(restarts_without_progress_max); mend what comes back at once; the last fault: rank 0: rank "
    "0: exception"
)
WHERE = "; the newest state known to be saved is that of step 4 in /run/state"


def give_up(rest: dict[str, Any]) -> tuple[State, list[Action]]:
    """Return what follows the last fault that the run may have."""
    options = replace(OPTIONS, restarts_without_progress_max=0, last_save_deadline_s=20.0)
    state = running(options)
    for generation in range(2):
        state, actions = play(
            state,
            failed("n0", 0, generation),
            *places(0, 1, generation=generation, rest=rest),
        )
    return state, actions


def reason(actions: list[Action]) -> str:
    (end,) = set(ends(actions))
    assert end.status == GAVE_UP_STATUS
    return end.reason


def test_one_more_generation_opens_to_save_the_state() -> None:
    state, actions = give_up(TELLS)

    assert (state.stage, state.generation) == (RUNNING, 2)
    assert [each.is_last for each in opened(actions)] == [True, True]
    assert Note(event="giving_up", fields={"reason": WHY}) in actions
    assert ends(actions) == []


def test_run_ends_with_the_word_of_the_first_rank_that_knows_where_the_state_lies() -> None:
    state, _ = give_up(TELLS)

    _, actions = play(
        state, finished("n1", 3, 2, GAVE_UP_STATUS, "the state of step 5 is saved in /run/state")
    )

    assert reason(actions) == f"{WHY}; rank 3: the state of step 5 is saved in /run/state"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (failed("n1", 2, 2), "rank 2: rank 2: exception"),
        (lost("n1"), "rank 2: n1 with ranks 2 to 3 is gone"),
    ],
    ids=["worker", "node"],
)
def test_fault_while_the_state_is_saved_ends_the_run_at_once(event: Any, words: str) -> None:
    state, _ = give_up(TELLS)

    state, actions = play(state, event)

    assert state.stage == ENDED
    assert reason(actions) == f"{WHY}; a fault came before the state was saved: {words}{WHERE}"


def test_save_that_takes_too_long_ends_the_run() -> None:
    state, _ = give_up(TELLS)
    state, actions = play(state, Tick(), now_s=19.9)
    assert ends(actions) == []

    _, actions = play(state, Tick(), now_s=20.0)

    assert reason(actions) == f"{WHY}; the state was not saved within 20 s{WHERE}"


def test_program_that_cannot_save_is_not_asked_to() -> None:
    state, actions = give_up({})

    assert state.stage == ENDED
    assert reason(actions) == WHY


def test_nothing_is_saved_where_no_rank_holds_a_state() -> None:
    """What was saved before is named: a rank has told of it in an earlier generation."""
    options = replace(OPTIONS, restarts_without_progress_max=0)
    state, _ = play(
        running(options),
        failed("n0", 0),
        *places(0, 1, rest=TELLS),
    )

    state, actions = play(
        state,
        failed("n0", 0, 1, "died"),
        *places(0, 1, generation=1, step=None),
    )

    assert state.stage == ENDED
    assert reason(actions).endswith(WHERE)


def test_run_without_a_node_for_a_place_says_where_its_state_lies() -> None:
    state, _ = play(running(), lost("n1"), *places(0, step=4, rest=TELLS))

    _, actions = play(state, Tick(), now_s=135.0)

    assert reason(actions) == (
        "no node took the place of lost n1 within 135 s; "
        "set resilience.checkpointless.standby_nodes" + WHERE
    )


def test_state_before_the_first_step_lies_nowhere() -> None:
    state, _ = give_up({"saved": 0, "place": ""})

    _, actions = play(state, failed("n1", 2, 2))

    assert reason(actions).endswith("; no state is saved, so a start begins at step 0")


def test_member_lost_before_the_last_generation_begins_does_not_change_the_reason() -> None:
    """That one has come about and never begun: no fault came into the way of the save."""
    options = replace(OPTIONS, num_nodes=3, restarts_without_progress_max=0)
    state, _ = play(State(options=options), *(join(f"n{place}") for place in range(4)))
    for generation in range(2):
        *before, last = places(0, 1, 2, generation=generation, rest=TELLS)
        state, _ = play(state, failed("n0", 0, generation), *before)
        if generation == 0:
            state, _ = play(state, last)
    state, _ = decide(state, last, 0.0)
    state, _ = play(state, lost("n2", is_dead=False))
    assert (state.generation, state.opened, state.giving_up) == (2, 1, WHY)

    state, actions = play(state, *places(0, 1, generation=2, rest=TELLS))

    assert [each.is_last for each in opened(actions)] == [True] * 3
    assert Note(event="giving_up", fields={"reason": WHY}) in actions
    assert state.fruitless == (frozenset(),)


def test_older_state_that_ranks_tell_of_is_all_that_is_left() -> None:
    """The newer one was in memory, and is gone with it."""
    newer = {"saved": 5, "place": "the nodes' memory"}
    state = running()
    for generation, tells in enumerate((newer, TELLS)):
        state, _ = play(
            state,
            failed("n0", 0, generation),
            *places(0, 1, generation=generation, rest=tells),
        )

    state, _ = play(state, lost("n1"))
    _, actions = play(state, Tick(), now_s=135.0)

    assert reason(actions).endswith(WHERE)
