"""What ranks say: of their faults, of what they hold once they have stopped, of their end. Pure."""

from __future__ import annotations

from dataclasses import replace

from resilience.agent.coordination import counters
from resilience.agent.coordination.events import Action, Note, Send
from resilience.agent.coordination.membership import REPORTS_WAIT, Decision, Stage, State, after
from resilience.agent.coordination.opening import advance, end_run
from resilience.agent.coordination.side_save import (
    begin_save,
    holds_whole,
    is_saving,
    say_problem,
)
from resilience.agent.coordination.size import find_passed
from resilience.comm.messages import PLANNED, Break, Failed, Finished, ReplaceRank, Stopped
from resilience.state.report import Phase, Report

_SIGNALED = 128
"""The exit status of a run that somebody stops by a signal is this and the signal's number."""
_REPLACED = ("died", "hung", "node lost", counters.OTHER_SHARD)
_AS_MEANT = (PLANNED, counters.OTHER_SHARD)
"""Why a rank has left its generation that nothing ails."""
_CONSEQUENCE = "group"
"""A connection has ended: the rank that says so first may be the last that holds its shard."""


def note_failed(state: State, node: str, failed: Failed, now_s: float) -> Decision:
    """Break the generation where the fault is its first, and count a later one."""
    if failed.generation != state.generation or not state.owns(node, failed.rank):
        return state, []
    state = counters.note_replaced(state, failed)
    if state.stage == Stage.RUNNING:
        return stop(state, failed, now_s)
    # A second fault while the first is dealt with: its rank reports what it holds, as all do.
    if failed.reason in _REPLACED:
        # What its process had reported is gone with it; the one that follows reports anew.
        others = {rank: each for rank, each in state.reports.items() if rank != failed.rank}
        state = replace(state, reports=others)
    first = state.first_failure
    if failed.reason == PLANNED:
        # Whoever left first has closed the connection that another one complains of. And who has
        # followed a coordinator knows of no fault: that one rank has left says that all may.
        is_cause = first is None or first.reason == _CONSEQUENCE
        return (replace(state, first_failure=failed) if is_cause else state), []
    follows = first is not None and first.reason in _AS_MEANT and failed.reason == _CONSEQUENCE
    if failed.reason == counters.OTHER_SHARD or follows:
        # Of one that has left, as all do, or of nobody: no fault.
        return state, []
    if first is None or not first.reason == _CONSEQUENCE != failed.reason:
        return state, [_detected(failed)]
    # It was the first, and was heard after what followed from it.
    return after([_detected(failed)], _count_own(replace(state, first_failure=failed), failed))


def _count_own(state: State, failed: Failed) -> Decision:
    """Count a fault that the rank's process has survived; that of a second one is replaced."""
    if failed.reason in (*_REPLACED, _CONSEQUENCE, PLANNED):
        return state, []
    number = state.in_process.get(failed.rank, 0) + 1
    state = replace(state, in_process={**state.in_process, failed.rank: number})
    node = state.nodes[state.members.seat(failed.rank).node_index]
    if number < 2 or node is None:
        return state, []
    reason = "faults again and again in one process"
    state = replace(state, replacing=state.replacing | {failed.rank})
    order = ReplaceRank(rank=failed.rank, reason=reason)
    return state, [Send(node=node, message=order)]


def stop(state: State, failed: Failed, now_s: float) -> Decision:
    """End the generation for everybody."""
    order = Break(generation=state.generation, reason=failed.text)
    is_meant = failed.reason in _AS_MEANT
    actions: list[Action] = [] if is_meant else [_detected(failed)]
    name = "generation_left" if is_meant else "generation_broken"
    actions += [
        Note(event=name, fields={"reason": failed.text}),
        *(Send(node=node, message=order) for node in state.nodes if node is not None),
    ]
    state = replace(
        state,
        replacing=frozenset(),
        stage=Stage.STOPPING,
        since_s=now_s,
        reports={},
        finished={},
        first_failure=failed,
        reason=REPORTS_WAIT,
    )
    state, more = _count_own(state, failed)
    actions += more
    is_over = state.giving_up is not None or not state.options.recovers
    if is_over and (end := counters.find_end(state)):
        # Nobody is told to begin afresh.
        return after(
            actions[:1], end_run(state, end.status, end.reason + counters.say_where(state))
        )
    return state, actions


def _detected(failed: Failed) -> Note:
    fields = {"reason": failed.reason, "text": failed.text, "quiet_s": failed.quiet_s}
    return Note(event="fault_detected", rank=failed.rank, fields=fields)


def note_stopped(state: State, node: str, stopped: Stopped, now_s: float) -> Decision:
    """Take what a rank holds, and go on once all have told."""
    if stopped.generation != state.generation or not state.owns(node, stopped.rank):
        return state, []
    actions: list[Action] = []
    if state.stage == Stage.RUNNING:
        text = f"rank {stopped.rank} has stopped"
        failed = Failed(
            generation=state.generation, rank=stopped.rank, reason="exception", text=text
        )
        state, actions = stop(state, failed, now_s)
    report = Report.from_json(stopped.report)
    # Where a rank of the first generation has no state yet, no step was committed.
    has_none = report.phase is Phase.FRESH and not stopped.is_replaced
    if not stopped.has_block or (has_none and stopped.generation == state.first):
        state = replace(state, is_stateless=True)
    if stopped.rank in state.replacing and report.phase is not Phase.FRESH:
        return state, actions
    passed = max(state.passed, find_passed([report]))
    state = replace(state, reports={**state.reports, stopped.rank: report}, passed=passed)
    return after(actions, advance(state, now_s))


def _end_with(state: State, finished: Finished, now_s: float) -> Decision:
    """End the run as one rank has asked; what others hold is saved where somebody stops the run.

    Its agent asks until the run ends. A generation that opens meanwhile lacks the rank, and breaks.
    """
    is_stopped, actions = finished.status > _SIGNALED, list[Action]()
    is_opening = state.stage == Stage.AGREEING or finished.generation < state.generation
    if is_stopped and is_opening and state.stage != Stage.GATHERING:
        return state, []
    if is_stopped := is_stopped and state.stage == Stage.STOPPING:
        state = replace(state, finished={**state.finished, finished.rank: finished})
        if _awaits_reports(state, now_s):
            return state, []
        if state.side_save is None:
            state, actions = begin_save(state, now_s)
        if is_saving(state):
            return state, actions
    words = say_problem(state) + (counters.say_where(state) if is_stopped else "")
    reason = f"rank {finished.rank}: {finished.text}{words}"
    return after(actions, end_run(state, finished.status, reason))


def _awaits_reports(state: State, now_s: float) -> bool:
    """Return whether a state may become whole by ranks that have not said yet what they hold."""
    told = {*state.reports, *state.finished}
    here = [place for place, node in enumerate(state.nodes) if node is not None]
    is_late = now_s - state.since_s >= state.options.stop_deadline_s
    is_settled = state.reports and (holds_whole(state) or not counters.can_save(state))
    is_missing = any({*state.members.ranks_of(place)} - told for place in here)
    return is_missing and not (is_late or is_settled)


def note_finished(state: State, node: str, finished: Finished, now_s: float) -> Decision:
    """End the run once all ranks have finished, or where one says that it had better end."""
    if finished.status and finished.text:
        if node in state.nodes or state.stage == Stage.GATHERING:
            return _end_with(state, finished, now_s)
        return state, []
    is_current = finished.generation == state.generation and state.stage == Stage.RUNNING
    if not is_current or not state.owns(node, finished.rank):
        return state, []
    is_first = not state.finished
    state = replace(state, finished={**state.finished, finished.rank: finished})
    if is_first:
        state = replace(state, since_s=now_s)
    if len(state.finished) < state.members.world_size:
        return state, []
    status = max(each.status for each in state.finished.values())
    return end_run(state, status, f"all ranks have {'ended' if status else 'finished'}")
