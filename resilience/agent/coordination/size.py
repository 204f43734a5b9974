"""Rules for the coordinator: how many members a generation has, when the size changes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import isinf

from resilience.agent.coordination.counters import is_left
from resilience.agent.coordination.events import Note, Send
from resilience.agent.coordination.membership import Decision, Membership, Stage, State
from resilience.agent.coordination.votes import HOLDS_NONE, find_given, find_held
from resilience.comm.messages import Leave, StopRun
from resilience.elastic.copies import add_holders, fill_copies
from resilience.elastic.policy import Growth, plan_growth
from resilience.state.layout import Layout
from resilience.state.report import Phase, Report, fresh_report

_SHOWS_NO_GATE = (Phase.FRESH, Phase.ENTERED, Phase.TORN_REPAIR)
GATHER_S = 2.0
"""Whoever asks one node to leave may be about to ask all: then the run is to stop."""


def look_at_size(state: State, now_s: float) -> Decision:
    """Have all ranks leave the open generation after a step, where the run's size is to change."""
    is_settled = state.stage == Stage.RUNNING and not (state.finished or state.is_leaving)
    if not is_settled or state.giving_up is not None:
        return state, []
    members, policy = state.members.nodes, state.options.policy
    asked = [node for node in members if not state.is_staying(node)]
    # Nodes that come may still make up for those of an elastic run.
    is_final = policy.fit(len(_staying(state))) == 0 if policy.is_elastic else True
    is_due = bool(asked) and now_s >= _gathered_s(state)
    if asked and (is_final or is_due) and not _may_let_go(state):
        return _stop_run(state, asked)
    growth = _plan_growth(state, members, now_s)
    if not is_due and not growth.nodes:
        return _tell_why(state, growth, now_s)
    order = Leave(generation=state.generation)
    return replace(state, is_leaving=True), [Send(node=members[0], message=order)]


def _tell_why(state: State, growth: Growth, now_s: float) -> Decision:
    """Write why nodes wait, each time that it has become something else."""
    if growth == state.told_growth:
        return state, []
    left_s = growth.due_s - now_s
    seconds = {} if isinf(left_s) else {"seconds": round(left_s, 1)}
    note = Note(event="nodes_wait", fields={"reason": growth.reason, **seconds})
    return replace(state, told_growth=growth), [note]


def _stop_run(state: State, asked: list[str]) -> Decision:
    if state.is_stopping:
        return state, []
    stops = [Send(node=node, message=StopRun()) for node in asked]
    return replace(state, is_stopping=True), [*stops]


def _staying(state: State) -> list[str]:
    return [node for node in state.present if state.is_staying(node)]


def _gathered_s(state: State) -> float:
    """Return when all have been asked to leave that are asked together.

    Where the others could not go on without them, nodes that come may change that meanwhile.
    """
    here = [node for node in state.members.nodes if node in state.present]
    asked = [node for node in here if not state.is_staying(node)]
    may_let_go, waits = bool(asked) and _may_let_go(state), []
    for node in asked:
        within_s = state.present[node].leaves_within_s or 0.0
        wait_s = min(GATHER_S, within_s / 4) if may_let_go else within_s / 2
        waits.append(state.asked_s.get(node, 0.0) + wait_s)
    return min(waits, default=float("inf"))


def _may_let_go(state: State) -> bool:
    """Return whether others go on with all of the state when those leave that were asked to."""
    members = state.members
    if state.options.policy.is_elastic:
        return choose_without_asked(state, members.nodes) != members.nodes
    staying = [place for place, node in enumerate(members.nodes) if node in _staying(state)]
    held = {shard for place in staying for shard in members.shards_of(place)}
    return may_wait(state) and held >= set(members.shards)


def may_wait(state: State) -> bool:
    """Return whether another node takes the place of one that is asked to leave."""
    others = [node for node in _staying(state) if node not in state.members.nodes]
    return state.options.recovers and (state.options.awaits_nodes or bool(others))


def next_look_s(state: State, now_s: float) -> float:
    """Return when the run's size is to be looked at without anything else happening."""
    if state.is_leaving or state.is_stopping:
        return float("inf")
    if not state.options.policy.is_elastic:
        return _gathered_s(state)
    growth = _plan_growth(state, state.members.nodes, now_s)
    return min(_gathered_s(state), now_s if growth.nodes else growth.due_s)


def _plan_growth(state: State, members: tuple[str, ...], now_s: float) -> Growth:
    return plan_growth(
        state.options.policy,
        state.sizing,
        size=len(members),
        waiting=[node for node in _staying(state) if node not in members],
        now_s=now_s,
    )


def may_shrink(state: State, now_s: float) -> bool:
    """Return whether the run goes on without the nodes whose places nobody has."""
    policy = state.options.policy
    here = [node for node in state.nodes if node is not None]
    if policy.fit(len(here)) == 0 or not has_reports(state, here):
        return False
    waited_s = now_s - state.since_s
    is_late = waited_s >= state.options.partition_patience_s
    empty = [place for place, node in enumerate(state.nodes) if node is None]
    chosen = _choose_left(state, tuple(here))
    if find_held(state, chosen) != find_held(state, here):
        # Another node is waited for; where none comes, all that is held is saved.
        return False
    return waited_s >= policy.shrink_after_s and find_given(state, is_late=is_late) == {*empty}


def choose_members(state: State, now_s: float) -> tuple[str, ...]:
    """Return the nodes that are to go on.

    Who leaves without being lost does so only where all ranks hold the same state, and nodes
    that bring none come in only then: after a fault those that are left get their state first.
    """
    here = tuple(node for node in state.nodes if node is not None)
    policy = state.options.policy
    if policy.is_elastic and len(here) < len(state.nodes):
        return _choose_left(state, here)
    if not policy.is_elastic or not _holds_one_state(state):
        return here
    if not all(map(state.is_staying, here)):
        return choose_without_asked(state, here)
    if growth := _plan_growth(state, here, now_s).nodes:
        return (*here, *growth)
    return here[: policy.fit(len(here)) or len(here)]


def _choose_left(state: State, here: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of the nodes that a fault has left go on.

    All of them, though that be no size of the run: then they have one state, and some leave. Only
    where a copy takes several nodes is there no generation of others than whole copies.
    """
    size = state.options.policy.fit(len(here))
    if state.options.nodes_per_copy == 1 or size == 0:
        return here
    return fill_copies(_columns(state, here), (), size // state.options.nodes_per_copy)


def choose_without_asked(state: State, here: tuple[str, ...]) -> tuple[str, ...]:
    """Return who goes on without those that were asked to leave; `here` where nobody could.

    Whoever waits takes the place of one that leaves, and has the state from one that stays. Where
    all that hold some part of it leave, or that is all of a copy, those go one generation later.
    """
    staying = [node for node in here if node in state.present and state.is_staying(node)]
    waiting = [node for node in _staying(state) if node not in here]
    size = state.options.policy.fit(min(len(here), len(staying) + len(waiting)))
    if size == 0:
        return here
    if state.options.nodes_per_copy == 1:
        newcomers = waiting[: max(0, size - len(staying))]
        return (*here, *newcomers) if newcomers else tuple(staying[:size])
    columns = _columns(state, staying)
    members = fill_copies(columns, waiting, size // state.options.nodes_per_copy)
    if all(columns):
        return members
    return add_holders(members, _columns(state, here), [*waiting, *here]) or here


def _columns(state: State, nodes: Sequence[str]) -> list[list[str]]:
    """Return which of the nodes have each part of a copy, first those that hold something."""
    columns: list[list[str]] = [[] for _ in range(state.options.nodes_per_copy)]
    for place, node in enumerate(state.nodes):
        if node is not None and node in nodes:
            columns[place % len(columns)].append(node)
    return [sorted(column, key=lambda each: not find_held(state, [each])) for column in columns]


def find_heir(state: State, members: tuple[str, ...]) -> str | None:
    """Return who is to coordinate before these go on; None where this agent stays.

    A coordinator that left once they have begun would have them stop within their first step.
    """
    start = state.ballot[1]
    own = next((node for node, join in state.present.items() if join.start == start), None)
    if own is None or own in members or state.is_staying(own):
        return None
    return members[0]


def _holds_one_state(state: State) -> bool:
    """Return whether all ranks have left the generation after the same step, as they were to.

    Who has passed the gate of that step, and was stopped before its update, ends it alone.
    """
    reports = state.reports.values()
    are_whole = all(each.phase not in HOLDS_NONE and each.is_healthy for each in reports)
    return is_left(state) and are_whole and len(set(map(_find_version, reports))) == 1


def _find_version(report: Report) -> tuple[int, int]:
    # An update that was torn had begun behind the gate.
    if report.phase in (Phase.ENTERED, Phase.PASSED, Phase.TORN_UPDATE):
        return report.gradient_generation, report.step + 1
    return report.step_generation, report.step


def find_passed(reports: Iterable[Report]) -> tuple[int, int]:
    """Return the newest update whose gate these ranks have passed; generation -1 where none has."""
    shown = (_find_version(each) for each in reports if each.phase not in _SHOWS_NO_GATE)
    return max(shown, default=(-1, -1))


def keep_proof(generation: Membership) -> tuple[Report, ...]:
    """Return the reports of all ranks; where ranks were in a gate that was passed, as passed.

    The ranks that passed it may be gone, and their reports with them. Without that proof the others
    would run the step again.
    """
    told = tuple(
        generation.reports.get(rank)
        or fresh_report(generation.members, rank, generation.generation)
        for rank in range(generation.members.world_size)
    )
    if find_passed(told) == generation.passed:
        return told
    return tuple(
        replace(each, phase=Phase.PASSED)
        if each.phase is Phase.ENTERED and _find_version(each) == generation.passed
        else each
        for each in told
    )


def is_passing(state: State, layout: Layout) -> bool:
    """Return whether a generation has no size that the run may have."""
    policy = state.options.policy
    return policy.is_elastic and len(layout.nodes) not in policy.sizes


def fits(state: State, layout: Layout) -> bool:
    """Return whether what is at hand is what a generation of these members begins with.

    Each has the place that it had, or one that was given to it; in a run that changes its size
    it is known by its name.
    """
    return layout.nodes == state.nodes or state.options.policy.is_elastic


def has_reports(state: State, nodes: Collection[str]) -> bool:
    """Return whether all ranks of these nodes have told what they hold.

    Where each place is to have a node, that is the ranks of all places.
    """
    is_missing = not state.options.policy.is_elastic and None in state.nodes
    return not is_missing and have_reported(state, nodes)


def have_reported(generation: Membership, nodes: Collection[str]) -> bool:
    """Return whether there is a report of each rank of these nodes."""
    wanted = {*nodes}
    return all(
        rank in generation.reports
        for place, node in enumerate(generation.nodes)
        if node in wanted
        for rank in generation.members.ranks_of(place)
    )
