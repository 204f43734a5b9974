"""Nodes of a run of one size that are asked to leave: what the coordinator decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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
from resilience.agent.coordination.size import find_passed
from resilience.checkpointless.plan import RecoveryPlan, plan_recovery
from resilience.comm.messages import (
    PLANNED,
    Leave,
    LetGo,
    SaveState,
    StateSaved,
    Stopped,
    StopRun,
)
from resilience.elastic.policy import Policy
from resilience.state.report import Phase, Report
from tests.resilience.agent.coordination.decisions import (
    OPTIONS,
    ends,
    failed,
    join,
    lost,
    opened,
    phases,
    play,
)
from tests.resilience.agent.coordination.test_size import asked, left, sent

SAVED = {"saved": 2, "place": "/run/state"}


def begun(*, nodes: int = 2, standby: int = 0, **options: Any) -> State:
    values = {"num_nodes": nodes, "num_standby_nodes": standby, "awaits_nodes": True, **options}
    state = State(options=replace(OPTIONS, policy=Policy(), **values))
    state, _ = play(state, *(join(f"n{index}") for index in range(nodes + standby)))
    assert (state.stage, len(state.members.nodes)) == (Stage.RUNNING, nodes)
    return state


def again(node: str, start: str) -> NodeJoined:
    one = join(node)
    return replace(one, join=replace(one.join, start=start))


def last_holder_is_asked() -> tuple[State, SaveState]:
    """Return its order; n1 was let go, and n0 is asked before another n1 has come."""
    state, _ = is_asked("n1")
    state, _ = play(state, Tick(), *left(state, rest=SAVED), now_s=12.0)
    state, _ = play(state, lost("n1"), now_s=12.5)
    state, actions = play(state, asked(state, "n0"), now_s=30.0)
    (order,) = [
        e.message for e in actions if isinstance(e, Send) and isinstance(e.message, SaveState)
    ]
    return state, order


def is_asked(*names: str, **options: Any) -> tuple[State, list[Action]]:
    """Return what comes of nodes that are asked at 10 s."""
    state, _ = play(begun(**options), Tick(), now_s=10.0)
    return play(state, *(asked(state, name) for name in names), now_s=10.0)


def test_the_others_keep_their_state_and_wait_for_another_node_in_the_place() -> None:
    state, first = is_asked("n1")
    assert not sent(first, Leave)
    state, second = play(state, Tick(), now_s=12.0)
    state, third = play(state, *left(state), now_s=12.1)
    assert sent(second, Leave) == ["n0"]
    assert sent(third, LetGo) == ["n1"]
    assert not sent([*first, *second, *third], StopRun)

    state, actions = play(state, lost("n1"), Tick(), now_s=13.0)
    assert (state.stage, opened(actions), ends(actions)) == (Stage.STOPPING, [], [])
    state, actions = play(state, again("n1", "later"), now_s=40.0)

    assert state.stage == Stage.RUNNING
    assert [phase == Phase.FRESH.value for phase in phases(opened(actions)[0])] == [
        False, False, True, True,
    ]  # fmt: skip
    # A requested leave is no fault.
    assert state.incidents == ()
    assert state.let_go == frozenset()


def in_step(node: str, rank: int, **values: Any) -> Said:
    """Return what a rank tells that is in the gate of a step, or where `values` say."""
    told = report(rank=rank, node=node, **values).to_json()
    return Said(node=node, message=Stopped(generation=0, rank=rank, report=told))


def report(**values: Any) -> Report:
    return Report(**{
        "rank": 0, "node": "n0", "generation": 0, "member_generation": 0, "step": 5,
        "phase": Phase.ENTERED, "gradient_generation": 0, **values,
    })  # fmt: skip


def goes_on(actions: list[Action]) -> tuple[int, tuple[int, ...]]:
    """Return with which step a generation begins, and the ranks that end it alone."""
    plan = plan_recovery(opened(actions)[0].read_reports())
    assert isinstance(plan, RecoveryPlan)
    return plan.step, plan.roll_forward


@pytest.mark.parametrize(
    ("leaver", "expected"),
    [
        pytest.param({"phase": Phase.COMPUTING, "step": 6, "step_generation": 0}, 6, id="updated"),
        pytest.param({"phase": Phase.PASSED, "gradient_generation": 0}, 6, id="passed"),
        pytest.param({"phase": Phase.TORN_UPDATE, "gradient_generation": 0}, 6, id="torn"),
        pytest.param({"phase": Phase.ENTERED, "gradient_generation": 0}, 5, id="none-has-passed"),
        pytest.param(
            {"phase": Phase.COMPUTING, "step": 6, "step_generation": 7}, 5, id="another-history"
        ),
    ],
)
def test_a_step_that_a_leaving_node_alone_has_ended_is_not_run_again(
    leaver: dict[str, Any], expected: int
) -> None:
    """The others are still in its gate, and end the update from their own gradients."""
    state, _ = is_asked("n1")
    state, _ = play(state, Tick(), now_s=10.0)
    leavers = [in_step("n1", rank, **leaver) for rank in (2, 3)]
    told = [failed("n1", 2, 0, PLANNED), in_step("n0", 0), in_step("n0", 1), *leavers]
    state, actions = play(state, *told, now_s=12.0)
    assert sent(actions, LetGo) == ["n1"]

    _, actions = play(state, lost("n1"), again("n1", "later"), now_s=40.0)

    assert goes_on(actions) == (expected, (0, 1) if expected == 6 else ())


def test_newest_gate_is_that_of_the_newest_generation() -> None:
    """After a return to a checkpoint its steps are earlier ones."""
    told = [report(step=s, gradient_generation=g, phase=Phase.PASSED) for s, g in [(9, 6), (5, 7)]]

    assert find_passed([*told, report(step=6, gradient_generation=7)]) == (7, 6)


@pytest.mark.parametrize("first", [0, 2])
def test_a_gate_that_a_killed_process_alone_had_passed_stays_passed(first: int) -> None:
    """Before or after the others have told that they are still in it."""
    others = [in_step("n0", 0), in_step("n0", 1), in_step("n1", 3)]
    passed = in_step("n1", 2, phase=Phase.PASSED)
    killed = [failed("n1", 2, 0, "died"), in_step("n1", 2, phase=Phase.FRESH)]

    told = [*others[:first], passed, *killed, *others[first:]]
    _, actions = play(begun(), failed("n0", 0), *told, now_s=1.0)

    assert goes_on(actions) == (6, (0, 1, 3))


def test_the_node_that_coordinates_hands_that_over_before_it_leaves() -> None:
    state, _ = play(begun(), Tick(), now_s=10.0)
    state = replace(state, ballot=(state.ballot[0], "n0"))
    state, _ = play(state, asked(state, "n0"), Tick(), now_s=10.0)
    _, actions = play(state, Tick(), *left(state), now_s=12.0)

    assert {each.node for each in actions if isinstance(each, HandOver)} == {"n1"}
    assert not sent(actions, LetGo)


@pytest.mark.parametrize(
    ("options", "names", "expected"),
    [
        pytest.param({}, ["n0", "n1"], StopRun, id="all-are-asked"),
        pytest.param({"awaits_nodes": False}, ["n1"], StopRun, id="nobody-starts-another"),
        pytest.param({"awaits_nodes": False, "standby": 1}, ["n1"], Leave, id="one-stands-by"),
        pytest.param({"num_shards": 4, "is_sharded": True}, ["n1"], StopRun, id="last-holder"),
        pytest.param(
            {"num_shards": 4, "is_sharded": True, "nodes": 4},
            ["n1", "n2"],
            Leave,
            id="a-copy-stays",
        ),
        pytest.param(
            {"num_shards": 4, "is_sharded": True, "nodes": 4}, ["n1", "n3"], StopRun, id="no-copy"
        ),
        pytest.param({"recovers": False}, ["n1"], StopRun, id="without-recovery"),
    ],
)
def test_a_node_leaves_only_where_the_rest_holds_the_state_and_another_node_comes(
    options: dict[str, Any], names: list[str], expected: type
) -> None:
    state, first = is_asked(*names, **options)
    _, second = play(state, Tick(), now_s=12.0)

    found = {kind for kind in (Leave, StopRun) if sent([*first, *second], kind)}
    assert found == {expected}


def test_a_standby_node_takes_the_place_at_once() -> None:
    state, _ = is_asked("n1", standby=1, awaits_nodes=False)
    state, actions = play(state, Tick(), *left(state), now_s=12.0)
    assert sent(actions, LetGo) == ["n1"]

    state, _ = play(state, lost("n1"), now_s=12.5)

    assert (state.stage, state.members.nodes) == (Stage.RUNNING, ("n0", "n2"))


def test_the_last_holder_saves_its_state_once_and_the_run_ends() -> None:
    """Pods of one job that are told within a minute: one stop, one saved state."""
    state, order = last_holder_is_asked()
    assert (order.rank, order.step) == (0, 5)
    state, actions = play(state, Tick(), Tick(), now_s=31.0)
    assert (sent(actions, SaveState), ends(actions)) == ([], [])

    said = StateSaved(generation=order.generation, rank=0, name=order.name, part="/run/state")
    state, actions = play(state, Said(node="n0", message=said), Tick(), now_s=32.0)

    assert state.stage == Stage.ENDED
    (end,) = set(ends(actions))
    assert end.status == 143
    assert end.reason == (
        "n0 asked to leave, and no other node holds the state; the newest state known to be saved "
        "is that of step 5 in /run/state"
    )
    assert Note(event="state_saved", fields={"saved_step": 5, "place": "/run/state"}) in actions


def test_the_last_holder_gives_its_state_to_a_node_that_comes_while_it_saves() -> None:
    state, order = last_holder_is_asked()
    said = StateSaved(generation=order.generation, rank=0, name=order.name, part="/run/state")

    state, actions = play(state, again("n1", "later"), now_s=31.0)
    state, more = play(state, Said(node="n0", message=said), Tick(), now_s=32.0)

    assert ends([*actions, *more]) == []
    assert state.stage == Stage.RUNNING
    # It is asked still, and leaves once the other one has the state.
    state, actions = play(state, Tick(), now_s=34.0)
    assert sent(actions, Leave) == ["n0"]


def test_the_run_waits_where_the_last_holder_can_save_nothing() -> None:
    state, _ = is_asked("n1")
    state, _ = play(state, Tick(), *left(state), lost("n1"), now_s=12.0)

    state, actions = play(state, asked(state, "n0"), Tick(), now_s=30.0)

    assert (state.stage, sent(actions, SaveState), ends(actions)) == (Stage.STOPPING, [], [])
