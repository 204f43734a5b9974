"""Deadlines of the coordinator, while the next generation lacks something. Pure."""

from __future__ import annotations

from dataclasses import replace

from resilience.agent.coordination import votes
from resilience.agent.coordination.counters import say_where
from resilience.agent.coordination.events import Action, Note
from resilience.agent.coordination.founding import SILENCE_S
from resilience.agent.coordination.membership import Decision, Stage, State, after
from resilience.agent.coordination.opening import end_run, holds_back
from resilience.agent.coordination.side_save import begin_save, check_save, is_saving, say_problem
from resilience.comm.messages import GAVE_UP_STATUS


def await_or_end(state: State, now_s: float) -> Decision:
    """Wait on for what is missing; when it has taken long save what is held here, then end."""
    patience_s = _patience_s(state)
    if patience_s != state.patience_s:
        # Who may go on since just now has all the time for it that there is.
        shortened_s = now_s if patience_s < state.patience_s else float("-inf")
        state = replace(state, patience_s=patience_s, shortened_s=shortened_s)
    since_s = max(state.since_s, state.shortened_s)
    # Until it is asked, the folder cannot say anything.
    waited_s = now_s - (max(since_s, state.claimed_s) if _lacks_record(state) else since_s)
    actions: list[Action] = []
    if state.stage == Stage.STOPPING and state.side_save is None:
        limit_s = state.options.partition_patience_s if _may_not_go_on(state) else patience_s
        if waited_s >= limit_s:
            state, actions = begin_save(state, now_s)
    if patience_s > waited_s >= state.options.lease_s:
        state, more = _tell_wait(state, patience_s - waited_s)
        actions += more
    state, more = check_save(state, now_s)
    actions += more
    if waited_s < patience_s or is_saving(state):
        return state, actions
    reason = _missing(state) + say_where(state) + say_problem(state)
    return after(actions, end_run(state, GAVE_UP_STATUS, reason))


def _tell_wait(state: State, left_s: float) -> Decision:
    """Say which nodes are waited for, each time that they have become others."""
    if state.stage != Stage.STOPPING:
        return state, []
    away = [name for name in state.members.nodes if name not in state.nodes]
    told: tuple[int | str, ...] = (state.generation, *away)
    if not away or told == state.told_away:
        return state, []
    names = ", ".join(away)
    reason = f"{names} or another node for each" if len(away) > 1 else f"{names} or another node"
    if votes.find_verdict(state) == votes.WAITS:
        reason = f"{names}, which may go on elsewhere"
    fields = {"reason": reason, "seconds": round(left_s, 1)}
    return replace(state, told_away=told), [Note(event="node_awaited", fields=fields)]


def _may_not_go_on(state: State) -> bool:
    """Return whether others may go on, or nobody says that these nodes may."""
    return votes.find_verdict(state) == votes.WAITS or _lacks_record(state)


def _lacks_record(state: State) -> bool:
    """Return whether the folder of the run was asked in vain which half goes on."""
    return state.stage == Stage.STOPPING and _has_asked(state)


def _has_asked(state: State) -> bool:
    """Return whether the folder was asked, and has not answered with what was asked for."""
    return state.is_claiming or state.answered_s >= state.since_s


def _patience_s(state: State) -> float:
    options = state.options
    if state.stage == Stage.GATHERING:
        # The folder is waited for longer than nodes are: a record of others has time to be void.
        has_asked = _has_asked(state) or state.founding is not None
        return options.join_deadline_s + (SILENCE_S if has_asked else 0.0)
    if _may_not_go_on(state) or holds_back(state):
        return 2 * options.partition_patience_s
    shrink_after_s = options.policy.shrink_after_s if options.policy.is_elastic else 0.0
    return options.join_deadline_s + options.stop_deadline_s + shrink_after_s


def _missing(state: State) -> str:
    options, waited_s = state.options, _patience_s(state)
    if state.stage == Stage.GATHERING:
        names = ", ".join(state.present) or "none"
        if (refusal := _refusal(state)) and len(state.present) >= options.num_nodes:
            return f"the run was not begun within {waited_s:g} s: {refusal}"
        return (
            f"{len(state.present)} of {options.num_nodes} nodes joined within "
            f"{waited_s:g} s ({names}); look at the logs of those that did not, or set a longer "
            "join deadline: a node joins when its workers have imported what they need"
        )
    if votes.find_verdict(state) == votes.WAITS and votes.lacks_reading(state):
        return f"the run's folder did not say within {waited_s:g} s whether others go on"
    if votes.find_verdict(state) == votes.WAITS:
        here = [name for name in state.members.nodes if name in state.voters]
        away = [name for name in state.members.nodes if name not in state.voters]
        return (
            f"of the members of generation {state.generation} {', '.join(here) or 'none'} "
            f"came and {', '.join(away)} did not within {waited_s:g} s; they may go on elsewhere"
        )
    if _lacks_record(state):
        what = "which half of the nodes goes on"
        return f"the run's folder did not say within {waited_s:g} s {what}: {_refusal(state)}"
    lost = [name for name, node in zip(state.members.nodes, state.nodes, strict=True) if not node]
    if lost:
        advice = (
            "set resilience.checkpointless.standby_nodes (--standby-nodes)"
            if options.recovers
            else "start it again"
        )
        return f"no node took the place of lost {', '.join(lost)} within {waited_s:g} s; {advice}"
    if state.stage == Stage.AGREEING:
        return f"{', '.join(sorted(state.asked))} did not agree to the next generation"
    ranks = [rank for rank in range(state.members.world_size) if rank not in state.reports]
    return f"ranks {ranks} neither stopped nor were replaced within {waited_s:g} s"


def _refusal(state: State) -> str:
    """Return why the folder did not say what it was asked."""
    return state.refusal or ("--run-dir does not answer" if state.is_claiming else "")
