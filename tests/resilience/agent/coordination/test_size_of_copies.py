"""How many members a generation has where a copy of the state takes two nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resilience.agent.coordination.events import Said, Tick
from resilience.agent.coordination.membership import Stage, State
from resilience.agent.coordination.size import next_look_s
from resilience.comm.messages import PLANNED, Leave, Open, SaveState, Stopped, StopRun
from resilience.elastic.policy import Policy
from resilience.state.report import Phase
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    failed,
    join,
    learned,
    lost,
    opened,
    play,
    stopped,
)
from tests.resilience.agent.coordination.test_size import LATER_S, asked, asked_to_leave, sent

NAMES = ("n0", "n1", "n2", "n3")


def begun(*nodes: str, sizes: tuple[int, ...] = (2, 4), **options: Any) -> State:
    values = replace(
        OPTIONS,
        num_nodes=2,
        num_standby_nodes=len(nodes) - 2,
        num_shards=4,
        is_sharded=True,
        policy=Policy(sizes=sizes, hold_s=1.0, snooze_s=1.0),
        **options,
    )
    state, _ = play(State(options=values), *map(join, nodes))
    assert state.stage == Stage.RUNNING
    return state


def told(state: State, *nodes: str, torn: tuple[int, ...] = ()) -> list[Said]:
    """Return what the ranks of these nodes say of the end of their generation."""
    found = []
    for node in nodes:
        for rank in state.members.ranks_of(state.members.index_of(node)):
            saved = {"saved": 2, "place": "/run/state"}
            said = stopped(node, rank, state.generation, rest=saved)
            assert isinstance(said.message, Stopped)
            phase = Phase.TORN_UPDATE if rank in torn else Phase.COMPUTING
            shard = state.members.seat(rank).shard
            report = {**said.message.report, "shard": shard, "phase": phase.value}
            found.append(replace(said, message=replace(said.message, report=report)))
    return found


def left(state: State) -> list[Any]:
    """Return what is heard when all ranks leave after a step."""
    nodes = state.members.nodes
    return [failed(nodes[0], 0, state.generation, PLANNED), *told(state, *nodes)]


def check_parts(state: State, openings: list[Open], *moved: str) -> None:
    """Assert that each node has the part that it had, but for these."""
    (before,) = {each.before for each in openings}
    assert before is not None
    for place, node in enumerate(state.members.nodes):
        old = before.index_of(node)
        if old >= 0:
            keeps = before.shards_of(old) == state.members.shards_of(place)
            assert keeps != (node in moved), node


def test_who_is_left_of_a_broken_copy_stands_by() -> None:
    state, actions = play(begun(*NAMES), lost("n1"), *told(begun(*NAMES), "n0", "n2", "n3"))

    assert state.members.nodes == ("n0", "n3")
    assert not any(each.is_passing for each in opened(actions))
    assert learned(actions) == ["n2"]
    check_parts(state, opened(actions))

    state, actions = play(state, lost("n0", is_dead=True), *told(state, "n3"), now_s=20.0)
    assert state.members.nodes == ("n2", "n3")


def test_halves_of_two_broken_copies_are_a_whole_one() -> None:
    for gone in (("n0", "n3"), ("n1", "n2")):
        here = [name for name in NAMES if name not in gone]

        state, actions = play(begun(*NAMES), *map(lost, gone), *told(begun(*NAMES), *here))

        assert sorted(state.members.nodes) == here
        check_parts(state, opened(actions))


def test_who_holds_state_goes_on_rather_than_who_holds_none() -> None:
    state = begun(*NAMES)

    state, _ = play(state, lost("n1"), *told(state, "n0", "n2", "n3", torn=(0, 1)))

    assert state.members.nodes == ("n2", "n3")


def test_a_copy_that_more_nodes_hold_than_may_go_on_waits_for_another_node() -> None:
    state = begun(*NAMES)
    # Of part 0, n0 holds one half and n2 the other.
    broken = told(state, "n0", "n2", "n3", torn=(0, 5))

    state, _ = play(state, lost("n1"), *broken)
    assert state.stage == Stage.STOPPING
    late, actions = play(state, Tick(), now_s=LATER_S)
    state, _ = play(state, join("n4"))

    assert state.members.nodes == ("n0", "n4", "n2", "n3")
    assert late.side_save is not None
    assert sorted(sent(actions, SaveState)) == ["n0", "n2", "n3", "n3"]


def test_the_run_grows_by_whole_copies() -> None:
    state = begun("n0", "n1")
    state, actions = play(state, join("n2"), now_s=10.0)
    state, more = play(state, Tick(), now_s=20.0)
    assert sent([*actions, *more], Leave) == []

    state, _ = play(state, join("n3"), now_s=30.0)
    state, actions = play(state, Tick(), now_s=32.0)
    assert sent(actions, Leave) == ["n0"]
    state, actions = play(state, *left(state), now_s=32.0)

    assert state.members.nodes == NAMES
    check_parts(state, opened(actions))


def test_a_node_that_is_asked_leaves_and_the_rest_of_its_copy_stands_by() -> None:
    state = begun(*NAMES)
    state, actions = asked_to_leave(state, "n1")
    assert sent(actions, Leave) == ["n0"]

    state, actions = play(state, *left(state), now_s=7.0)

    assert state.members.nodes == ("n0", "n3")
    assert state.incidents == ()
    check_parts(state, opened(actions))


def test_who_stands_by_takes_the_place_of_one_that_is_asked() -> None:
    state = begun(*NAMES, "n4")
    state, _ = asked_to_leave(state, "n1")

    state, actions = play(state, *left(state), now_s=7.0)

    assert state.members.nodes == ("n0", "n3", "n2", "n4")
    check_parts(state, opened(actions))


def test_all_that_hold_a_part_leave_once_others_have_it() -> None:
    state = begun(*NAMES)
    state, actions = asked_to_leave(state, "n0", "n2")
    assert len(sent(actions, Leave)) == 1

    state, actions = play(state, *left(state), now_s=7.0)
    assert state.members.nodes == ("n0", "n1", "n3", "n2")
    check_parts(state, opened(actions), "n2", "n3")

    state, actions = play(state, Tick(), now_s=7.1)
    assert len(sent(actions, Leave)) == 1
    state, actions = play(state, *left(state), now_s=7.2)
    assert state.members.nodes == ("n3", "n1")
    assert state.incidents == ()
    check_parts(state, opened(actions))


def test_the_only_copy_is_handed_on_where_enough_nodes_come_in_time() -> None:
    state = begun("n0", "n1", "n2")
    assert state.members.nodes == ("n0", "n1")

    state, actions = play(state, asked(state, "n1"), now_s=5.0)
    state, more = play(state, Tick(), now_s=15.0)
    assert sent([*actions, *more], Leave) == []
    assert next_look_s(state, 15.0) > 15.0

    # A second one that waits makes the copies of the next generation whole.
    state, actions = play(state, join("n4"), now_s=16.0)
    assert sent(actions, Leave) == ["n0"]
    state, actions = play(state, *left(state), now_s=16.1)
    assert state.members.nodes == ("n0", "n1", "n4", "n2")
    check_parts(state, opened(actions))


def test_the_run_stops_rather_than_lose_its_only_copy() -> None:
    state = begun("n0", "n1", "n2")
    state, actions = play(state, asked(state, "n1", 30.0), now_s=5.0)
    state, more = play(state, Tick(), now_s=19.9)
    assert sent([*actions, *more], StopRun) == []
    assert next_look_s(state, 19.9) == 20.0

    state, actions = play(state, Tick(), now_s=20.0)

    assert sent(actions, StopRun) == ["n1"]
    assert sent(actions, Leave) == []
    assert next_look_s(state, 20.0) > 20.0
