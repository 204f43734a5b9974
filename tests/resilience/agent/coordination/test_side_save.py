"""State that is saved of a run that does not go on: by nodes alone, without a node, at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.coordinator import decide, take_over
from resilience.agent.coordination.counters import UNTOLD
from resilience.agent.coordination.events import (
    Action,
    Claimed,
    ClaimRecord,
    NodeEnded,
    NodeJoined,
    Note,
    Said,
    Send,
    Tick,
)
from resilience.agent.coordination.membership import Options, Stage, State
from resilience.agent.coordination.standing import Standing
from resilience.agent.coordination.votes import find_doubted
from resilience.comm.messages import GAVE_UP_STATUS, SaveState, StateSaved
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    ends,
    failed,
    finished,
    hear,
    join,
    layout,
    lost,
    opened,
    places,
    play,
    promise,
    running,
    stopped,
)

THREE = ("n0", "n1", "n2")
THREE_NODES = Options(
    num_nodes=3, num_local_ranks=2, partition_patience_s=100.0, last_save_deadline_s=30.0
)
TELLS: dict[str, Any] = {"saved": 4, "place": "/run/state"}
ASKED: dict[str, Any] = {"status": 143, "text": "asked to end"}


def shut_out(*, rest: dict[str, Any] = TELLS, steps: tuple[int, int] = (5, 5)) -> State:
    """Return what the last of three knows that is alone from 0 s on."""
    state = follow("n2")
    state, _ = play(
        state,
        join("n2", 4, THREE),
        *(stopped("n2", rank, 4, step, rest) for rank, step in zip((4, 5), steps, strict=True)),
    )
    return state


def follow(*more: str, members: Layout | None = None, options: Options = THREE_NODES) -> State:
    return take_over(
        options,
        Standing(generation=4, opened=4, layout=members or layout(*THREE), shares_folder=True),
        lost="n0",
        known={*THREE, *more},
        now_s=0.0,
    )


def orders(actions: list[Action]) -> list[SaveState]:
    sent = [each.message for each in actions if isinstance(each, Send)]
    return [each for each in sent if isinstance(each, SaveState)]


def saved(order: SaveState, node: str = "n2", **what: str) -> Said:
    message = StateSaved(generation=order.generation, rank=order.rank, name=order.name, **what)
    return Said(node=node, message=message)


def reason(actions: list[Action], status: int = 75) -> str:
    (end,) = set(ends(actions))
    assert end.status == status
    return end.reason


def test_side_that_may_not_go_on_saves_what_it_holds_and_says_where() -> None:
    state, actions = play(shut_out(), Tick(), now_s=99.0)
    assert orders(actions) == []

    state, actions = play(state, Tick(), now_s=100.0)
    (order,) = orders(actions)
    state, more = play(state, saved(order, part="/run/state"), Tick(), now_s=101.0)
    assert ends([*actions, *more]) == []
    assert Note(event="state_saved", fields={"saved_step": 5, "place": "/run/state"}) in more
    _, actions = play(state, Tick(), now_s=200.0)

    assert (order.rank, order.step, order.generation) == (4, 5, 4)
    assert reason(actions).endswith(
        "the newest state known to be saved is that of step 5 in /run/state"
    )
    assert "n2 came and n0, n1 did not within 200 s" in reason(actions)


def test_a_node_that_has_told_and_is_lost_is_not_asked_to_save() -> None:
    told = [stopped("n1", rank, 4, 5, TELLS) for rank in (2, 3)]
    state, _ = play(shut_out(), join("n1", 4, THREE), *told, lost("n1", is_dead=False), now_s=50.0)

    _, actions = play(state, Tick(), now_s=150.0)

    assert [each.rank for each in orders(actions)] == [4]


def test_save_has_a_deadline_of_its_own() -> None:
    state, _ = play(shut_out(), Tick(), now_s=100.0)
    state, actions = play(state, Tick(), now_s=130.0)

    text = "rank 4 did not save its part within 30 s"
    (warning,) = [each for each in actions if isinstance(each, Note)]
    assert warning.fields == {"text": f"what these nodes hold was not saved: {text}"}
    _, actions = play(state, Tick(), now_s=200.0)
    assert reason(actions).endswith(f"; what is held here was not saved: {text}")


def test_rank_that_dies_while_it_saves_is_not_waited_for() -> None:
    state, _ = play(shut_out(), Tick(), now_s=100.0)
    gone = {rank: each for rank, each in state.reports.items() if rank != 4}

    _, actions = play(replace(state, reports=gone), Tick(), now_s=101.0)

    assert "did not come together" in str(actions)


def sharded(*steps: int | None) -> State:
    """Return what a node knows that has two of four ranks, each with a shard of its own."""
    nodes = ("n0", "n1", "n2", "n3")
    plain = make_layout(nodes=nodes, num_local_ranks=2, num_shards=4)
    members = replace(plain, starts=nodes)
    state = follow("n3", members=members)
    late = replace(join("n2", 4, nodes).join, layout=members)
    state, _ = play(state, NodeJoined(join=late))
    for rank, step in zip((4, 5), steps, strict=True):
        said = stopped("n2", rank, 4, step, TELLS).message
        shard = members.seat(rank).shard
        state, _ = play(
            state, Said(node="n2", message=replace(said, report={**said.report, "shard": shard}))
        )
    return state


def test_side_that_holds_a_part_saves_nothing_and_says_so() -> None:
    state, actions = play(sharded(5, 5), Tick(), now_s=100.0)

    assert orders(actions) == []
    _, actions = play(state, Tick(), now_s=200.0)
    assert reason(actions).endswith(
        "that of step 4 in /run/state; what is held here was not saved: of step 5 nobody here "
        "holds shard 2, 3"
    )


def test_newest_state_that_is_whole_is_saved() -> None:
    _, actions = play(shut_out(steps=(5, 6)), Tick(), now_s=100.0)

    assert [(each.rank, each.step) for each in orders(actions)] == [(5, 6)]


def test_torn_and_changed_states_are_not_saved() -> None:
    state = shut_out()
    torn = {
        4: replace(state.reports[4], phase=Phase.TORN_UPDATE),
        5: replace(state.reports[5], is_healthy=False),
    }
    _, actions = play(replace(state, reports=torn), Tick(), now_s=100.0)
    assert orders(actions) == []

    different = {rank: replace(each, digest=f"{rank}") for rank, each in state.reports.items()}
    _, actions = play(replace(state, reports=different), Tick(), now_s=100.0)
    assert orders(actions) == []


def test_what_is_saved_already_or_cannot_be_saved_is_not_asked_for() -> None:
    for rest in ({"saved": 5, "place": "/run/state"}, {}):
        _, actions = play(shut_out(rest=rest), Tick(), now_s=100.0)

        assert orders(actions) == []


def test_run_that_lacks_a_node_saves_before_it_ends() -> None:
    state = follow(options=replace(THREE_NODES, join_deadline_s=20.0, stop_deadline_s=5.0))
    reports = places(1, 2, generation=4, rest=TELLS)
    state, _ = play(state, join("n1", 4, THREE), join("n2", 4, THREE), *reports)

    state, actions = play(state, Tick(), now_s=25.0)
    (order,) = orders(actions)
    assert ends(actions) == []
    state, actions = play(state, saved(order, "n1", part="the tiers"), Tick(), now_s=26.0)

    assert state.stage == Stage.ENDED
    assert "no node took the place of lost n0" in reason(actions)
    assert reason(actions).endswith("that of step 5 in the tiers")


def test_run_that_is_stopped_while_it_lacks_a_node_saves_before_it_ends() -> None:
    reports = places(1, 2, generation=4, rest=TELLS)
    state, _ = play(follow(), join("n1", 4, THREE), join("n2", 4, THREE), *reports)

    state, actions = play(state, finished("n2", 4, 4, **ASKED))
    (order,) = orders(actions)
    state, actions = play(state, finished("n2", 4, 4, **ASKED))
    assert actions == [], "it asks until the run ends"
    state, _ = play(state, saved(order, "n1", part="the tiers"))
    _, actions = play(state, finished("n2", 4, 4, **ASKED))

    assert reason(actions, 143).startswith("rank 4: asked to end")
    assert reason(actions, 143).endswith("that of step 5 in the tiers")


def test_run_that_is_stopped_as_a_rank_ends_early_saves_what_the_others_hold() -> None:
    """A spare's process that has just got the rank obeys the signal at once."""
    state, early = running(), (failed("n1", 3, reason="died"), finished("n1", 3, **ASKED))
    others = [stopped(f"n{rank // 2}", rank, 0, 5, TELLS) for rank in range(3)]

    state, actions = play(state, *early, *others, finished("n1", 3, **ASKED))
    (order,) = orders(actions)
    # Another rank of the node follows it, and its word is heard as well.
    state, _ = play(state, failed("n1", 2, reason="died"), finished("n1", 2, **ASKED))
    state, _ = play(state, saved(order, "n0", part="the tiers"))
    _, actions = play(state, finished("n1", 3, **ASKED))

    assert (order.rank, order.step) == (0, 5)
    assert reason(actions, 143) == (
        "rank 3: asked to end; the newest state known to be saved is that of step 5 in the tiers"
    )


def test_rank_that_says_nothing_holds_up_a_stop_for_the_stop_deadline() -> None:
    state, _ = play(running(), failed("n1", 3, reason="died"))

    state, early = play(state, finished("n1", 3, **ASKED), now_s=14.9)
    _, actions = play(state, stopped("n0", 0, rest=TELLS), finished("n1", 3, **ASKED))
    _, late = play(state, finished("n1", 3, **ASKED), now_s=15.0)

    assert ends(early) == ends(actions) == []
    assert [each.rank for each in orders(actions)] == [0], "one holds all that is to be saved"
    assert reason(late, 143).startswith("rank 3: asked to end")


def test_half_whose_folder_does_not_answer_waits_as_long_as_others_may_go_on() -> None:
    state, _ = play(follow("n3", members=layout("n0", "n1")), join("n1", 4, ("n0", "n1")))
    state, _ = hear(state, join("n3"), *places(1, generation=4, rest=TELLS))
    state, _ = hear(state, Tick(), now_s=3.0)
    state, actions = hear(state, *promise(state, "n1", "n3"), now_s=3.0)
    assert any(isinstance(each, ClaimRecord) for each in actions)
    unknown = Claimed(generation=5, layout=None, reason="it is gone")
    state, actions = hear(state, unknown, Tick(), now_s=50.0)
    state, actions = hear(state, Tick(), now_s=51.0)
    assert [isinstance(each, ClaimRecord) for each in actions] == [True]

    state, actions = hear(state, Tick(), now_s=199.0)
    assert [each.rank for each in orders(actions)] == [2]
    state, actions = hear(state, Tick(), now_s=203.0)
    state, more = hear(state, Tick(), now_s=230.0)

    words = "did not say within 200 s which half of the nodes goes on: it is gone"
    assert words in reason([*actions, *more])


def test_folder_has_its_time_from_when_it_is_asked() -> None:
    """The node that was missing came late."""
    options = replace(THREE_NODES, partition_patience_s=100.0, join_deadline_s=120.0)
    state = follow("n3", members=layout("n0", "n1"), options=options)
    state, _ = hear(state, join("n1", 4, ("n0", "n1")), *places(1, generation=4))
    state, _ = hear(state, Tick(), now_s=125.0)

    state, actions = hear(state, join("n3"), now_s=126.0)
    state, more = hear(state, *promise(state, "n1", "n3"), Tick(), now_s=126.0)
    (claim,) = [each for each in (*actions, *more) if isinstance(each, ClaimRecord)]
    assert ends([*actions, *more]) == []
    for now_s in (127.0, 201.0, 220.0):
        state, more = hear(state, Tick(), now_s=now_s)
        assert ends(more) == []
    state, _ = play(state, Claimed(generation=5, layout=claim.layout), now_s=221.0)

    assert state.stage == Stage.RUNNING
    assert state.members.nodes == ("n3", "n1")


# ---- evidence


def end_of(node: str, *starts: str) -> NodeEnded:
    return NodeEnded(node=node, starts=frozenset(starts or {node}), reason="it is off")


def test_standby_alone_goes_on_once_the_node_has_ended() -> None:
    options = replace(THREE_NODES, num_nodes=1)
    state = follow("n9", members=layout("n0"), options=options)
    state = replace(state, known=frozenset({"n0", "n9"}))
    state, actions = play(state, join("n9"))
    assert (opened(actions), find_doubted(state)) == ([], {"n0": frozenset({"n0"})})

    state, actions = play(state, end_of("n0"), now_s=1.0)

    assert Note(event="node_ended", fields={"node": "n0", "reason": "it is off"}) in actions
    assert (state.stage, state.layout) == (Stage.RUNNING, layout("n9"))
    assert opened(actions)[0].generation > 100


def test_evidence_about_another_start_is_none() -> None:
    state = follow("n9", members=layout("n0"), options=replace(THREE_NODES, num_nodes=1))
    state = replace(state, known=frozenset({"n0", "n9"}), starts={"n0": "newer"})
    state, _ = play(state, join("n9"))

    state, _ = play(state, end_of("n0", "n0"), end_of("n0", "newer"), now_s=1.0)
    assert state.stage == Stage.STOPPING
    state, _ = play(state, end_of("n0", "n0", "newer"), now_s=1.0)

    assert state.stage == Stage.RUNNING


def test_last_holder_of_a_shard_is_not_waited_for_once_it_has_ended() -> None:
    state = follow(members=layout(*THREE))
    fresh = places(1, 2, generation=4, step=None)
    state, actions = play(
        state, join("n1", 4, THREE), join("n2", 4, THREE), join("n9"), *fresh, now_s=4.0
    )
    assert opened(actions) == []

    state, actions = play(state, end_of("n0"), now_s=4.0)

    assert state.stage == Stage.RUNNING
    assert len(opened(actions)) == 3


def test_nobody_is_doubted_who_is_at_hand() -> None:
    state, _ = play(follow(), join("n1", 4, THREE), join("n2", 4, THREE))

    assert find_doubted(state) == {"n0": frozenset({"n0"})}
    state, _ = play(state, join("n0", 4, THREE))
    assert find_doubted(state) == {}
    state, _ = play(state, end_of("n0"))
    assert "n0" not in state.dead


def test_nodes_that_have_saved_are_members_again_when_the_others_come_back() -> None:
    state, actions = play(shut_out(), Tick(), now_s=100.0)
    (order,) = orders(actions)
    state, _ = play(state, saved(order, part="/run/state"), Tick(), now_s=101.0)
    reports = places(0, 1, generation=4, rest=TELLS)

    state, actions = play(state, join("n0", 4, THREE), join("n1", 4, THREE), *reports, now_s=150.0)

    assert (state.stage, state.members.nodes, state.side_save) == (Stage.RUNNING, THREE, None)
    told = opened(actions)[0].read_reports()
    assert {(each.phase, each.step) for each in told} == {(Phase.COMPUTING, 5)}


# ---- what is saved before the run gives up

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


def test_one_more_generation_opens_to_save_the_state() -> None:
    state, actions = give_up(TELLS)

    assert (state.stage, state.generation) == (Stage.RUNNING, 2)
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

    assert state.stage == Stage.ENDED
    assert reason(actions) == f"{WHY}; a fault came before the state was saved: {words}{WHERE}"


def test_save_that_takes_too_long_ends_the_run() -> None:
    state, _ = give_up(TELLS)
    state, actions = play(state, Tick(), now_s=19.9)
    assert ends(actions) == []

    _, actions = play(state, Tick(), now_s=20.0)

    assert reason(actions) == f"{WHY}; the state was not saved within 20 s{WHERE}"


def test_program_that_cannot_save_is_not_asked_to() -> None:
    state, actions = give_up({})

    assert state.stage == Stage.ENDED
    assert reason(actions) == WHY + UNTOLD


def test_nothing_is_saved_where_no_rank_holds_a_state() -> None:
    """The state that a rank has told of in an earlier generation is named as saved."""
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

    assert state.stage == Stage.ENDED
    assert reason(actions).endswith(WHERE)


def test_state_before_the_first_step_lies_nowhere() -> None:
    state, _ = give_up({"saved": 0, "place": ""})

    _, actions = play(state, failed("n1", 2, 2))

    assert reason(actions).endswith("; no state is saved, so a start begins at step 0")


def test_member_lost_before_the_last_generation_begins_does_not_change_the_reason() -> None:
    """The generation was opened and never begun: no fault disturbed the save."""
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
