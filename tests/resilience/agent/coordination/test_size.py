"""How many members a generation has: what the coordinator decides, in few words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilience.agent.coordination.coordinator import next_deadline_s, take_over
from resilience.agent.coordination.counters import OTHER_SHARD
from resilience.agent.coordination.events import (
    Action,
    HandOver,
    NodeJoined,
    Note,
    Said,
    Send,
    Tick,
)
from resilience.agent.coordination.membership import Stage, State
from resilience.agent.coordination.standing import Standing
from resilience.comm.messages import GAVE_UP_STATUS, PLANNED, Join, Leave, Stopped, StopRun
from resilience.elastic.policy import Policy
from resilience.state.layout import Layout, make_layout
from resilience.state.report import Phase
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    all_stopped,
    ends,
    failed,
    join,
    learned,
    lost,
    opened,
    phases,
    places,
    play,
    stopped,
)

LATER_S = 1000.0


def begun(*nodes: str, now_s: float = 0.0, low: int = 1, **policy: Any) -> State:
    values: dict[str, Any] = {"sizes": (1, 2, 3), "hold_s": 1.0, "snooze_s": 1.0, **policy}
    options = replace(
        OPTIONS, num_nodes=low, num_standby_nodes=len(nodes) - low, policy=Policy(**values)
    )
    state, _ = play(State(options=options), *map(join, nodes), now_s=now_s)
    assert state.stage == Stage.RUNNING
    return state


def asked(state: State, node: str, within_s: float = 30.0) -> NodeJoined:
    return NodeJoined(join=replace(state.present[node], leaves_within_s=within_s))


def standing_of(state: State) -> Standing:
    """Return what a member of the first generation knows as its coordinator is lost."""
    return Standing(
        generation=0, layout=state.members, opened=0, ballot=state.ballot, shares_folder=True
    )


def asked_to_leave(state: State, *names: str) -> tuple[State, list[Action]]:
    """Return what comes of nodes that are asked at 5 s, and of a look around at 7 s."""
    state, first = play(state, *(asked(state, name) for name in names), now_s=5.0)
    assert sent(first, Leave) == []
    return play(state, Tick(), now_s=7.0)


def torn(node: str, rank: int) -> Said:
    """Return the word of a rank that has failed within its update."""
    said = stopped(node, rank, 0, 5)
    assert isinstance(said.message, Stopped)
    report = {**said.message.report, "phase": Phase.TORN_UPDATE.value}
    return replace(said, message=replace(said.message, report=report))


def sent(actions: list[Action], kind: type) -> list[str]:
    return [e.node for e in actions if isinstance(e, Send) and isinstance(e.message, kind)]


def left(state: State, *, rest: Any = None) -> list[Said]:
    """Return what is heard when all ranks leave after a step."""
    nodes, generation = state.members.nodes, state.generation
    ranks = range(state.members.world_size)
    told = [stopped(nodes[rank // 2], rank, generation, 5, rest) for rank in ranks]
    return [failed(nodes[0], 0, generation, PLANNED), *told]


def test_a_growth_that_is_due_is_looked_at_though_nothing_else_happens() -> None:
    state = begun("n0", "n1", now_s=10.0)
    state, _ = play(state, join("n2"), now_s=10.2)

    before_s, ripe_s = next_deadline_s(state, 10.5), next_deadline_s(state, 11.3)

    assert before_s == pytest.approx(11.2)
    assert ripe_s <= 11.3


def test_a_run_begins_with_the_largest_size_that_has_come() -> None:
    assert begun("n0", "n1", "n2").members.nodes == ("n0", "n1", "n2")
    assert begun("n0", "n1", "n2", sizes=(1, 2)).members.nodes == ("n0", "n1")


def test_a_lost_node_is_left_out_at_once() -> None:
    state, actions = play(
        begun("n0", "n1", "n2"),
        lost("n1"),
        *places(0, 2),
    )

    assert state.stage == Stage.RUNNING
    assert state.members.nodes == ("n0", "n2")
    (first, second) = opened(actions)
    assert first.before is not None
    assert first.before.nodes == ("n0", "n1", "n2")
    assert [phase == Phase.FRESH.value for phase in phases(first)] == [
        False, False, True, True, False, False,
    ]  # fmt: skip
    assert first is second
    assert [each.node for each in state.incidents] == ["n1"]


def test_one_that_stands_by_takes_the_place_of_a_lost_node_first() -> None:
    state, actions = play(
        begun("n0", "n1", "n2", sizes=(1, 2)), lost("n1"), stopped("n0", 0), stopped("n0", 1)
    )

    assert state.members.nodes == ("n0", "n2")
    assert [each.before for each in opened(actions)] == [None, None]


def test_a_silent_node_that_may_hold_the_last_copy_is_waited_for() -> None:
    state = begun("n0", "n1", "n2")
    told = [torn(f"n{rank // 2}", rank) for rank in (0, 1, 4, 5)]

    state, _ = play(state, lost("n1", is_dead=False), *told)

    assert state.stage == Stage.STOPPING


def test_below_the_least_size_the_run_waits_and_gives_up() -> None:
    state, _ = play(
        begun("n0", "n1", "n2", low=2, sizes=(2, 3)),
        lost("n1"),
        lost("n2"),
        *[stopped("n0", rank, 0, 5) for rank in (0, 1)],
    )
    assert state.stage == Stage.STOPPING

    state, actions = play(state, Tick(), now_s=LATER_S)
    state, more = play(state, Tick(), now_s=2 * LATER_S)

    assert state.stage == Stage.ENDED
    assert {each.status for each in ends([*actions, *more])} == {GAVE_UP_STATUS}


def test_a_number_that_is_no_size_recovers_and_is_left_again() -> None:
    names = ("n0", "n1", "n2", "n3")
    state = begun(*names, sizes=(2, 4), low=2)
    told = places(0, 2, 3)

    state, actions = play(state, lost("n1"), *told)

    assert state.members.nodes == ("n0", "n2", "n3")
    assert all(each.is_passing for each in opened(actions))

    state, actions = play(state, *left(state))

    assert state.members.nodes == ("n0", "n2")
    assert not any(each.is_passing for each in opened(actions))
    assert learned(actions) == ["n3"]
    assert [each.node for each in state.incidents] == ["n1"]


def test_the_run_grows_once_a_node_has_been_there() -> None:
    state, actions = play(begun("n0", "n1"), join("n2"), now_s=10.0)
    assert sent(actions, Leave) == []

    state, actions = play(state, Tick(), now_s=11.0)
    assert sent(actions, Leave) == ["n0"]
    state, again = play(state, Tick(), now_s=12.0)
    assert sent(again, Leave) == []

    state, actions = play(state, *left(state), now_s=12.0)

    assert state.members.nodes == ("n0", "n1", "n2")
    assert state.incidents == ()
    (first, *_) = opened(actions)
    assert first.before is not None
    assert first.before.nodes == ("n0", "n1")


def test_a_fault_on_the_way_to_another_size_keeps_the_old_one() -> None:
    state, _ = play(begun("n0", "n1"), join("n2"), now_s=10.0)
    state, _ = play(state, Tick(), now_s=11.0)

    state, _ = play(
        state, failed("n1", 2, 0, "died"), *all_stopped(0, but=(2,)),
        stopped("n1", 2, 0, None), now_s=12.0,
    )  # fmt: skip

    assert state.members.nodes == ("n0", "n1")
    assert state.stage in (Stage.RUNNING, Stage.AGREEING)


def test_a_node_that_is_asked_to_leave_goes_after_a_step_of_all() -> None:
    state, actions = asked_to_leave(begun("n0", "n1", "n2"), "n1")
    assert sent(actions, Leave) == ["n0"]
    state, actions = play(state, *left(state), now_s=7.0)

    assert state.members.nodes == ("n0", "n2")
    assert learned(actions) == ["n1"]
    assert state.incidents == ()


def test_who_stands_by_has_the_state_before_the_last_holder_leaves() -> None:
    state = begun("n0", "n1", sizes=(1,))
    assert state.members.nodes == ("n0",)
    state, _ = asked_to_leave(state, "n0")

    state, actions = play(state, *left(state), now_s=7.0)
    assert state.members.nodes == ("n0", "n1")
    assert all(each.is_passing for each in opened(actions))

    state, _ = play(state, *left(state), now_s=8.0)
    assert state.members.nodes == ("n1",)


@pytest.mark.parametrize(("num_shards", "counts"), [(2, True), (4, False)])
def test_a_member_counts_at_another_place_where_its_ranks_have_the_same_shards(
    num_shards: int, counts: bool
) -> None:
    def members(*nodes: str) -> Layout:
        plain = make_layout(nodes=nodes, num_local_ranks=2, num_shards=num_shards)
        return replace(plain, starts=nodes)

    standing = Standing(generation=5, layout=members("n0", "n1"), opened=4)
    state = take_over(OPTIONS, standing, lost="n0", now_s=0.0)
    held = Join(
        node="n1", address="n1:1", start="n1", generation=4, layout=members("n1", "n0"), opened=4
    )

    state, _ = play(state, NodeJoined(join=held))

    assert ("n1" in state.voters) == counts
    assert ("n1" in state.dead) != counts


@pytest.mark.parametrize("wait_s", [30.0, 10 * LATER_S])
def test_a_lost_node_is_waited_for_as_long_as_the_recipe_says(wait_s: float) -> None:
    """Also for longer than a run of one size waits."""
    state, _ = play(
        begun("n0", "n1", "n2", shrink_after_s=wait_s),
        lost("n1"),
        *places(0, 2),
    )

    state, _ = play(state, Tick(), now_s=wait_s - 1)
    assert state.stage == Stage.STOPPING
    state, _ = play(state, Tick(), now_s=wait_s)

    assert (state.stage, state.members.nodes) == (Stage.RUNNING, ("n0", "n2"))


def test_a_run_that_could_not_stop_for_a_fault_is_stopped_again() -> None:
    state = begun("n0", "n1")
    state, actions = play(state, asked(state, "n0"), asked(state, "n1"), now_s=5.0)
    assert sorted(sent(actions, StopRun)) == ["n0", "n1"]
    state, actions = play(state, Tick(), now_s=6.0)
    assert sent(actions, StopRun) == []

    state, actions = play(
        state, failed("n1", 2, 0, "exception"), *all_stopped(0), Tick(), now_s=7.0
    )

    assert (state.stage, state.members.nodes) == (Stage.RUNNING, ("n0", "n1"))
    assert sorted(sent(actions, StopRun)) == ["n0", "n1"]


def test_a_rank_that_complains_of_one_that_has_left_is_no_fault() -> None:
    """The connection that a rank closed as it left is heard of before its own word."""
    state, _ = asked_to_leave(begun("n0", "n1", "n2"), "n1")

    state, _ = play(state, failed("n2", 4, 0, "group"), *left(state), now_s=7.0)

    assert state.members.nodes == ("n0", "n2")
    assert (state.incidents, state.fruitless) == ((), ())


def succeeded(*more: NodeJoined, leaves_within_s: float | None = None, **policy: Any) -> State:
    """Return what n1 coordinates, at 100 s, once n0 is lost of three."""
    before = begun("n0", "n1", "n2", **policy)
    state = take_over(before.options, standing_of(before), lost="n0", now_s=100.0)
    joins = [join(name, 0, before.members.nodes) for name in ("n1", "n2")]
    joins[1] = replace(joins[1], join=replace(joins[1].join, leaves_within_s=leaves_within_s))
    told = places(1, 2)
    state, _ = play(state, *joins, *more, lost("n0"), *told, now_s=100.0)
    assert state.stage == Stage.RUNNING
    return state


@pytest.mark.parametrize("first", [PLANNED, OTHER_SHARD])
def test_what_follows_from_one_that_left_as_it_was_to_is_no_fault(first: str) -> None:
    state, actions = play(begun("n0", "n1"), failed("n0", 0, 0, first))
    state, more = play(state, failed("n1", 2, 0, "group"), failed("n1", 3, 0, OTHER_SHARD))
    _, then = play(state, failed("n1", 3, 0, "died"))

    found = [[e.event for e in each if isinstance(e, Note)] for each in (actions, more, then)]
    assert found == [["generation_left"], [], ["fault_detected"]]


def test_a_new_coordinator_lets_the_run_keep_its_size_for_a_while() -> None:
    """Though it is the size that it was: when that changed, the last one knew."""
    state = succeeded(join("n3"), join("n4"), sizes=(1, 3, 4), snooze_s=60.0)
    assert sorted(state.members.nodes) == ["n1", "n2", "n3"]

    state, actions = play(state, Tick(), now_s=159.0)
    assert sent(actions, Leave) == []
    state, actions = play(state, Tick(), now_s=160.0)

    assert len(sent(actions, Leave)) == 1


def test_a_new_coordinator_lets_go_who_was_asked_to_leave_under_the_last_one() -> None:
    state = succeeded(leaves_within_s=20.0)
    assert state.members.nodes == ("n1", "n2")

    state, actions = play(state, Tick(), now_s=101.0)
    assert sent(actions, Leave) == []
    state, actions = play(state, Tick(), now_s=102.0)
    assert sent(actions, Leave) == ["n1"]
    state, _ = play(state, *left(state), now_s=102.0)

    assert state.members.nodes == ("n1",)


def test_a_coordinator_whose_node_is_asked_to_leave_hands_over_before_the_others_go_on() -> None:
    state = replace(begun("n0", "n1", "n2"), ballot=(1, "n0"))
    state, _ = asked_to_leave(state, "n0")
    end = left(state)

    state, actions = play(state, *end, now_s=7.0)
    assert (state.stage, opened(actions)) == (Stage.STOPPING, [])
    assert HandOver(node="n1") in actions

    heir = take_over(state.options, standing_of(state), lost="", now_s=7.1)
    heir = replace(heir, ballot=(2, "n1"))
    joins = [join(node, 0, state.members.nodes) for node in ("n0", "n1", "n2")]
    joins[0] = replace(joins[0], join=replace(joins[0].join, leaves_within_s=20.0))
    joins = [replace(each, join=replace(each.join, promised=(2, "n1"))) for each in joins]
    heir, actions = play(heir, *joins, *end, now_s=7.1)

    assert [each.layout.nodes for each in opened(actions)] == [("n1", "n2")] * 2
    # Counts for nothing, and who has left first is told of no fault.
    assert (heir.incidents, heir.fruitless) == ((), ())


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_coordinator_stays_one_while_another_node_leaves(node: str) -> None:
    state = replace(begun("n0", "n1", "n2"), ballot=(1, "n0"))
    state, _ = asked_to_leave(state, node)

    state, actions = play(state, *left(state), now_s=7.0)

    assert not any(isinstance(each, HandOver) for each in actions)


def test_a_coordinator_that_learns_of_a_newer_generation_forgets_nobody_that_waits() -> None:
    """Who has asked to leave is gathered with others, and who has come is waited for no longer."""
    before = begun("n0", "n1", "n2")
    state = take_over(before.options, standing_of(before), lost="n0", now_s=100.0)
    old = join("n2", 0, before.members.nodes)
    old = replace(old, join=replace(old.join, leaves_within_s=20.0))

    state, _ = play(state, join("n3"), old, now_s=100.0)
    state, _ = play(state, join("n1", 1, ("n1", "n2", "n0")), now_s=101.0)

    assert state.generation == 1
    assert state.asked_s == {"n2": 100.0}
    assert state.sizing.came_s["n3"] == 100.0


def test_who_comes_back_after_it_was_asked_to_leave_stays() -> None:
    state = begun("n0", "n1", "n2")
    state, _ = play(state, asked(state, "n1"), now_s=5.0)
    again = replace(state.present["n1"], start="again", leaves_within_s=None, generation=-1)

    state, _ = play(state, lost("n1"), NodeJoined(join=again), now_s=6.0)

    assert "n1" not in state.asked_s
    assert state.is_staying("n1")


def why(actions: list[Action]) -> list[Any]:
    return [dict(e.fields) for e in actions if isinstance(e, Note) and e.event == "nodes_wait"]


def test_why_a_node_waits_is_told_once_at_a_size() -> None:
    state = begun("n0", "n1", hold_s=5.0)
    state, actions = play(state, join("n2"), now_s=2.0)
    assert why(actions) == [
        {"reason": "the next node that waits does not count yet", "seconds": 5.0}
    ]

    state, actions = play(state, Tick(), Tick(), now_s=3.0)
    assert why(actions) == []

    state, _ = play(state, Tick(), now_s=LATER_S)
    state, actions = play(state, *left(state), now_s=LATER_S)
    assert state.members.nodes == ("n0", "n1", "n2")
    # That it has come says that none waits.
    state, actions = play(state, Tick(), now_s=LATER_S)
    assert why(actions) == []


def test_a_node_too_few_for_the_next_size_is_told_without_a_time() -> None:
    state = begun("n0", sizes=(1, 3))
    state, actions = play(state, join("n1"), now_s=LATER_S)
    state, later = play(state, Tick(), now_s=2 * LATER_S)

    (first, second) = why([*actions, *later])
    assert "seconds" in first
    assert second == {"reason": "2 nodes are there; sizes allowed: 1, 3"}
