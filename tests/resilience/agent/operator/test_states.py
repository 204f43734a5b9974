"""The table of states: events in, states and actions out, without a process or a clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.agent.operator.commands import StartBody, StopBody, UpdateBody
from resilience.agent.operator.states import (
    HELD_S,
    MOVES,
    Event,
    NodeState,
    RefusalError,
    RunEnded,
    Stepped,
    decide,
    describe,
)
from tests.resilience.agent.operator.driver import start_body

RULE = {
    "name": "Steps",
    "logPattern": ".*",
    "expectedStartCutOffInSeconds": 60,
    "expectedRecurringFrequencyInSeconds": 5,
}
START = StartBody.model_validate(start_body(1, ["10.0.0.1", "10.0.0.2"]))
WATCHED = StartBody.model_validate(start_body(log_monitoring_configuration=[RULE]))
DONE = RunEnded(status=0, text="", is_told=True)
FAILED = RunEnded(status=75, text="rank 3: it failed", is_told=True)
KILLED = RunEnded(status=137, text="killed", is_told=False)
STOPPED = RunEnded(status=143, text="asked to end", is_told=True)
STOP = StopBody(is_graceful=True, timeout=7)


GRACEFUL = StopBody(is_graceful=True)
AT_ONCE = StopBody()


def after(*events: Event, state: NodeState | None = None) -> NodeState:
    """Return the state after some events, a second after each other."""
    state = state or NodeState()
    for second, event in enumerate(events):
        state = decide(state, event, second)
    return state


STATES = {
    "init": after(),
    "ready": after("up"),
    "running": after("up", START),
    "completed": after("up", START, DONE),
    "faulted": after("up", START, FAILED),
    "stopping": after("up", START, STOP),
    "shutdown": after("up", START, "shutdown"),
}
PLACE = UpdateBody.model_validate(start_body(1, ["10.0.0.1", "10.0.0.2"]))
COMMANDS: dict[str, Event] = {
    "start": START,
    "update": PLACE,
    "stop": STOP,
    "shutdown": "shutdown",
}
TAKEN = {
    "init": {"update": "init", "shutdown": "shutdown"},
    "ready": {"start": "running", "update": "ready", "shutdown": "shutdown"},
    "running": {"update": "running", "stop": "stopping", "shutdown": "shutdown"},
    "completed": {"stop": "stopping", "shutdown": "shutdown"},
    "faulted": {"stop": "stopping", "shutdown": "shutdown"},
    "stopping": {},
    "shutdown": {},
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", STATES)
def test_each_command_is_taken_or_refused_by_the_state(name: str, command: str) -> None:
    state = STATES[name]
    if (expected := TAKEN[name].get(command)) is None:
        with pytest.raises(RefusalError, match=f"the agent is {name}"):
            decide(state, COMMANDS[command], 9)
        return

    assert decide(state, COMMANDS[command], 9).status == expected


@pytest.mark.parametrize(
    ("events", "has_run", "stop", "status"),
    [
        pytest.param([START], True, None, None, id="start"),
        pytest.param([START, STOP], True, STOP, None, id="stop-of-a-run"),
        pytest.param([START, DONE, STOP, Stepped(1)], False, None, None, id="stop-of-nothing"),
        pytest.param([START, STOP, STOPPED, Stepped(1)], False, None, None, id="stopped"),
        pytest.param(["shutdown"], False, None, 0, id="shutdown-when-ready"),
        pytest.param([START, DONE, "shutdown"], False, None, 0, id="shutdown-when-done"),
        pytest.param([START, FAILED, "shutdown"], False, None, 75, id="shutdown-of-a-failure"),
        pytest.param(
            [START, FAILED, STOP, Stepped(1), "shutdown"],
            False,
            None,
            0,
            id="shutdown-later",
        ),
        pytest.param([START, "shutdown"], True, AT_ONCE, None, id="shutdown-of-a-run"),
        pytest.param([START, "shutdown", STOPPED], False, AT_ONCE, 143, id="shut-down"),
        pytest.param([START, "terminated"], True, GRACEFUL, None, id="signal-in-a-run"),
        pytest.param([START, "terminated", STOPPED], False, GRACEFUL, 143, id="ended-by-a-signal"),
        pytest.param([START, STOP, "terminated"], True, STOP, None, id="signal-in-a-stop"),
        pytest.param(
            [START, STOP, "terminated", STOPPED], False, STOP, 143, id="ended-by-it-in-a-stop"
        ),
    ],
)
def test_what_is_to_be_done_after_events(
    events: list[Event], has_run: bool, stop: StopBody | None, status: int | None
) -> None:
    state = after("up", *events)

    assert (state.has_run, state.stop, state.exit_status) == (has_run, stop, status)


@pytest.mark.parametrize(
    ("ended", "reason", "message"),
    [(FAILED, "WorkerCrash", "rank 3: it failed"), (KILLED, "WorkerFault", "killed")],
)
def test_a_run_that_gives_up_is_faulted_with_its_words(
    ended: RunEnded, reason: str, message: str
) -> None:
    state = after("up", START, ended)

    told = describe(state, {}, num_workers=2, folder="/run", version="1")
    assert (told["status"], told["reason"], told["message"]) == ("faulted", reason, message)
    again = after(STOP, Stepped(1), START, state=state)
    assert (again.status, again.reason, again.message) == ("running", "Running", "")


def test_a_node_whose_run_another_node_has_stopped_waits_for_its_own_stop() -> None:
    """The operator stops one node after the other: none of them has a fault."""
    state = after("up", START, STOPPED)

    assert state.status == "running"
    held = decide(state, Stepped(4), 2 + HELD_S - 1)
    assert held.status == "running"
    assert after(STOP, Stepped(4), state=held).status == "ready"
    late = decide(held, Stepped(4), 2 + HELD_S)
    assert (late.status, late.reason) == ("faulted", "WorkerCrash")


@pytest.mark.parametrize(
    ("looks", "reason"),
    [
        ([(0, -1), (59, -1)], ""),
        ([(0, -1), (61, -1)], "LogHang_Steps"),
        ([(0, -1), (59, 0), (63, 0)], ""),
        ([(0, 0), (4, 1), (8, 2), (12, 2)], ""),
        ([(0, 3), (4, 3), (6, 3)], "LogHang_Steps"),
        # Steps that are run again are no progress.
        ([(0, 3), (4, 1), (6, 2)], "LogHang_Steps"),
    ],
)
def test_a_run_without_a_step_for_a_rules_time_hangs(
    looks: list[tuple[float, int]], reason: str
) -> None:
    state = decide(after("up"), WATCHED, 0)
    for second, step in looks:
        state = decide(state, Stepped(step), second)

    assert (state.status == "faulted") == bool(reason)
    if reason:
        assert state.reason == reason
        since = " after 3" if state.step >= 0 else ""
        limit_s = 5 if since else 60
        assert state.message == f"no step{since} within {limit_s} s"
        # Its processes live on, and the operator's /stop ends them.
        assert decide(state, STOP, 99).stop == STOP


@pytest.mark.parametrize("change", [{"rank": 0}, {"nnodes": 3}, {"faultCount": 3}])
def test_a_run_keeps_its_place_in_an_update(change: dict[str, Any]) -> None:
    state = STATES["running"]
    body = UpdateBody.model_validate({**PLACE.model_dump(), **change})

    with pytest.raises(RefusalError, match=next(iter(change))):
        decide(state, body, 9)


def test_an_update_makes_a_spare_active() -> None:
    state, told = after("up"), []
    for spare in (True, False):
        state = after(UpdateBody.model_validate(start_body(spare=spare)), state=state)
        told.append(describe(state, {}, num_workers=1, folder="", version="")["spare"])

    assert told == ["True", "False"]


def test_status_has_the_fields_of_the_protocol() -> None:
    state = decide(STATES["running"], Stepped(7), 2.5)
    dates = {"READY": "2026-09-09T01:46:40+00:00"}

    told = describe(state, dates, num_workers=2, folder="/run", version="1.2")

    assert told == {
        "status": "running",
        "transitions": dates,
        "reason": "Running",
        "restartMode": "process_level_restart",
        "worker_data": [
            {"rank": 2, "group_rank": 1, "local_rank": 0, "failed": False, "data": '{"step": 7}'},
            {"rank": 3, "group_rank": 1, "local_rank": 1, "failed": False, "data": '{"step": 7}'},
        ],
        "ipversion": "v0",
        "progress": {"run": {"progressData": "/run", "progressCount": 7}},
        "agent_version": "1.2",
        "assigned_rank": "1",
        "spare": "False",
    }


def test_status_leaves_out_what_is_not_known() -> None:
    told = describe(after("up"), {}, num_workers=2, folder="/run", version="1.2")

    assert told == {
        "status": "ready",
        "restartMode": "process_level_restart",
        "agent_version": "1.2",
        "spare": "True",
    }


EVENTS = st.sampled_from(
    [
        "up",
        START,
        WATCHED,
        COMMANDS["update"],
        STOP,
        "shutdown",
        "terminated",
        Stepped(1),
        Stepped(9),
    ]
)
ENDS = st.sampled_from([DONE, FAILED, KILLED, STOPPED])


@given(st.lists(st.tuples(EVENTS, ENDS, st.booleans(), st.floats(0, 100)), max_size=40))
def test_whatever_comes_the_node_moves_by_the_table_and_runs_once_at_a_time(
    events: list[tuple[Event, RunEnded, bool, float]],
) -> None:
    """A run ends at any moment at which one is there; refused commands change nothing."""
    state, second = NodeState(), 0.0
    for command, end, ends, pause_s in events:
        second += pause_s
        event = end if ends and state.has_run else command
        try:
            found = decide(state, event, second)
        except RefusalError:
            continue
        left = {"shutdown"} if state.leaves else set()
        assert found.status in {state.status} | MOVES[state.status] | left
        assert not (found.status == "ready" and found.has_run)
        assert (found.stop is None) or found.status in ("stopping", "shutdown")
        if isinstance(event, StartBody):
            assert not state.has_run
        if found.exit_status is not None:
            assert not found.has_run
            return
        state = found
