"""The states of a node as HyperPod's operator sees them, and what each event does. Pure.

    INIT -> READY -> RUNNING -> COMPLETED or FAULTED
    RUNNING, COMPLETED, FAULTED -> STOPPING -> READY
    all but STOPPING -> SHUTDOWN

`decide` takes one event and returns the next state, which says what is to be done: a node that has
become RUNNING starts a run, one with `stop` ends it, and one with `exit_status` ends the agent. A
command that the table has no place for raises RefusalError, and changes nothing. A fault that the
run recovers from is no event here: the node stays RUNNING.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from resilience.agent.operator.commands import StartBody, StopBody, UpdateBody

STOPPED_STATUS = 143
"""Exit status of a run that was asked to end, here or on another node."""
HELD_S = 30.0
"""Seconds that a node stays RUNNING after another node's /stop has ended its run."""
_WORKER = ("rank", "group_rank", "local_rank", "failed", "data")


Status = Literal["init", "ready", "running", "completed", "faulted", "stopping", "shutdown"]
"""The operator reads it as `status`."""
MOVES: dict[Status, set[Status]] = {
    "init": {"ready", "shutdown"},
    "ready": {"running", "shutdown"},
    "running": {"completed", "faulted", "stopping", "shutdown"},
    "completed": {"stopping", "shutdown"},
    "faulted": {"stopping", "shutdown"},
    "stopping": {"ready"},
    "shutdown": set(),
}
"""The states that may follow each one."""
Notice = Literal["up", "shutdown", "terminated"]
"""Events without a content: the agent can start a run; the operator, or a signal, ends it."""


class RefusalError(Exception):
    """A command that the node's state has no place for; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The node's part of the run has ended, and no process of it is left."""

    status: int
    text: str
    """Why, in one line."""
    is_told: bool
    """Whether the run itself has said so; else its agent has died."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The newest step that a worker of the node has shown is this one; -1 for none."""

    step: int


Event = Notice | StartBody | UpdateBody | StopBody | RunEnded | Stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """All that a command is judged by, and /status tells."""

    status: Status = "init"
    reason: str = ""
    message: str = ""
    body: UpdateBody | None = None
    """The node's place, by the last /start or /update."""
    has_run: bool = False
    """Whether processes of a run may live."""
    stop: StopBody | None = None
    """How a run has to end, while it does."""
    ended: RunEnded | None = None
    """How the last run has ended, until a /stop."""
    leaves: bool = False
    """Whether a signal ends the agent once the run has stopped."""
    exit_status: int | None = None
    """With which the agent ends now."""
    step: int = -1
    step_s: float = 0.0
    """When the step was shown first, or the run was started, by the monotonic clock."""


def decide(state: NodeState, event: Event, now_s: float) -> NodeState:
    """Return what follows from an event; raises RefusalError where a command has no place."""
    match event:
        case "up":
            return _move(state, "ready")
        case StartBody():
            running = _move(state, "running", "Running")
            return replace(running, body=event, has_run=True, step=-1, step_s=now_s)
        case UpdateBody():
            return _update(state, event)
        case StopBody():
            return replace(_move(state, "stopping"), stop=event)
        case "shutdown":
            return _leave(state, StopBody())
        case "terminated" if state.status in ("stopping", "shutdown"):
            return replace(state, leaves=True)
        case "terminated":
            return _leave(state, StopBody(is_graceful=True))
        case RunEnded():
            return _end(replace(state, has_run=False, ended=event), event, now_s)
        case Stepped() if state.status == "running":
            return _look(state, event.step, now_s)
        case Stepped() if state.status == "stopping" and not state.has_run:
            return replace(_move(state, "ready"), stop=None, ended=None)
    return state


def _move(state: NodeState, status: Status, reason: str = "", text: str = "") -> NodeState:
    if status not in MOVES[state.status]:
        before = ", ".join(each for each, after in MOVES.items() if status in after)
        raise RefusalError(f"the agent is {state.status}, and becomes {status} from: {before}")
    return replace(state, status=status, reason=reason, message=text)


def _update(state: NodeState, body: UpdateBody) -> NodeState:
    """Take a new place in; a run that has begun keeps its own."""
    if state.status not in ("init", "ready", "running"):
        raise RefusalError(f"the agent is {state.status}, and takes a place when it is ready")
    for name in ("rank", "nnodes", "faultCount") if state.status == "running" else ():
        if getattr(body, name) != (own := getattr(state.body, name)):
            raise RefusalError(f"the run goes on with {name} {own} until /stop and another /start")
    return replace(state, body=body)


def _leave(state: NodeState, stop: StopBody) -> NodeState:
    leaving = _move(state, "shutdown")
    if state.has_run:
        return replace(leaving, stop=stop)
    return replace(leaving, exit_status=state.ended.status if state.ended else 0)


def _end(state: NodeState, ended: RunEnded, now_s: float) -> NodeState:
    """Judge the end of a run."""
    if state.status == "shutdown" or state.leaves:
        return replace(state, status="shutdown", exit_status=ended.status)
    if state.status != "running":
        return state
    if ended.is_told and ended.status == STOPPED_STATUS:
        # Another node's stop has ended the run: the operator's /stop to this one is near.
        return replace(state, step_s=now_s)
    return _move(state, "completed") if ended.status == 0 else _fault(state, ended)


def _fault(state: NodeState, ended: RunEnded) -> NodeState:
    reason = "WorkerCrash" if ended.is_told else "WorkerFault"
    return _move(state, "faulted", reason, ended.text)


def _look(state: NodeState, step: int, now_s: float) -> NodeState:
    """Judge a run by its newest step, and one that has ended before its /stop by the time."""
    waited_s = now_s - state.step_s
    if state.ended is not None:
        return _fault(state, state.ended) if waited_s >= HELD_S else state
    if step > state.step:
        return replace(state, step=step, step_s=now_s)
    for rule in state.body.log_monitoring_configuration if state.body else ():
        limit_s = rule.recurring_s if state.step >= 0 else rule.start_s
        if limit_s is not None and waited_s >= limit_s:
            after = f" after {state.step}" if state.step >= 0 else ""
            text = f"no step{after} within {limit_s:g} s"
            return _move(state, "faulted", f"LogHang_{rule.name}", text)
    return state


def describe(
    state: NodeState, dates: Mapping[str, str], *, num_workers: int, folder: str, version: str
) -> dict[str, Any]:
    """Return the answer to /status, with the fields of HyperPod's own agent, none of them empty.

    `dates` say when each state was entered last.
    """
    place, has_step = state.body, state.step >= 0
    rank = place.rank if place else 0
    own = range(rank * num_workers, (rank + 1) * num_workers) if has_step else range(0)
    values = [(each, rank, each - own.start, False, f'{{"step": {state.step}}}') for each in own]
    progress = {"run": {"progressData": folder, "progressCount": state.step}}
    told = {
        "status": state.status,
        "transitions": dict(dates),
        "reason": state.reason,
        "message": state.message,
        "restartMode": "process_level_restart",
        "worker_data": [dict(zip(_WORKER, each, strict=True)) for each in values],
        "ipversion": place and place.ipVersion,
        "progress": progress if has_step else {},
        "agent_version": version,
        "assigned_rank": str(rank) if place else "",
        # Until the operator says otherwise.
        "spare": str(place.spare if place else True),
    }
    return {name: value for name, value in told.items() if value}
