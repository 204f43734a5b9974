"""How often a run may be broken before it ends for it. Pure.

An *incident* is all that one node loses between two committed steps: whatever has
ended its processes there, and however many they were, it is one thing to mend. Only
what was replaced counts. A rank that comes back with its state, a node that was silent
and is there again, an exception that its process survives, a process that makes room for
one with another shard: these are none.

Two limits hold, and the second is for what comes back at once:

- incidents within the window, `restarts_max` for each node of the run. One is forgiven
  by so many committed steps.
- generations in a row that end without a committed step. Those in which nodes lost
  processes count for these nodes alone, all others for the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

from resilience.agent.coordination.membership import Incident, LastState, Membership, Stage, State
from resilience.comm.messages import GAVE_UP_STATUS, PLANNED, End, Failed
from resilience.state.report import Phase

OTHER_SHARD = "other shard"
"""Why a process ends whose node has got another place: that is planned, and counts for nothing."""
_NAMED_MAX = 4
"""More nodes than this make a reason no clearer."""


def note_replaced(state: State, failed: Failed) -> State:
    """Note whether a rank's process has ended as it was to."""
    kept = state.planned - {failed.rank}
    return replace(state, planned=kept | {failed.rank} if failed.reason == OTHER_SHARD else kept)


def count(state: State, now_s: float) -> State:
    """Count what the generation that ends now has lost; once, before the next one opens."""
    if state.stage == Stage.GATHERING:
        return state
    steps = [
        each.step + (each.phase is Phase.PASSED)
        for each in state.reports.values()
        if each.phase is not Phase.FRESH
    ]
    step = max(steps, default=state.last_step)
    lost = _find_lost(state)
    has_progressed = state.first_failure is None or step > state.last_step
    is_planned = (bool(state.planned) or is_left(state)) and not lost
    fruitless = state.fruitless if is_planned else (*state.fruitless, lost)
    return replace(
        state,
        incidents=_count_incidents(state, lost, step, now_s),
        # A fallback has taken the run back: what it does from there on is progress.
        last_step=step,
        saved=find_saved(state),
        fruitless=() if has_progressed else fruitless,
        in_process={} if has_progressed else state.in_process,
    )


def is_left(generation: Membership) -> bool:
    """Return whether the ranks have left the generation as they were asked to."""
    return generation.first_failure is not None and generation.first_failure.reason == PLANNED


def _find_lost(state: State) -> frozenset[str]:
    """Return the nodes of which a process was replaced, or all of them with the node."""
    return frozenset(
        state.members.seat(rank).node
        for rank, report in state.reports.items()
        # A process that has not come to its state yet was a member all the same.
        if report.phase is Phase.FRESH
        and report.member_generation < 0
        and rank not in state.planned
        and state.members.seat(rank).node not in state.let_go
    )


def _count_incidents(
    state: State, lost: frozenset[str], step: int, now_s: float
) -> tuple[Incident, ...]:
    """Add the new ones; leave out those that are forgiven, or older than the window."""
    options = state.options
    kept = [
        each
        for each in state.incidents
        if now_s - each.at_s < options.restart_window_s
        and step - each.step < options.restarts_forgiven_after_steps
    ]
    known = {each.node for each in kept if each.step == step}
    new = [Incident(node=node, at_s=now_s, step=step) for node in sorted(lost - known)]
    # Steps that a fallback has taken back forgive nothing.
    return (*(replace(each, step=min(each.step, step)) for each in kept), *new)


def _count_fruitless(state: State) -> int:
    by_node = Counter(chain.from_iterable(state.fruitless))
    return sum(not lost for lost in state.fruitless) + max(by_node.values(), default=0)


def _find_problem(state: State) -> str | None:
    options, failed = state.options, state.first_failure
    last = f"; the last fault: rank {failed.rank}: {failed.text}" if failed else ""
    if (number := _count_fruitless(state)) > options.restarts_without_progress_max:
        return (
            f"{number} faults without a committed step between them, allowed are "
            f"{options.restarts_without_progress_max} (restarts_without_progress_max); mend "
            f"what comes back at once{last}"
        )
    num_nodes = len(state.members.nodes)
    allowed = options.restarts_max * num_nodes
    if len(state.incidents) > allowed:
        return (
            f"{len(state.incidents)} incidents within {options.restart_window_s:g} s "
            f"({_name_nodes(state)}), allowed are {allowed} (process_restarts_max "
            f"{options.restarts_max} for each of {num_nodes} nodes); look for what they have in "
            f"common, or allow more{last}"
        )
    return None


def _name_nodes(state: State) -> str:
    """Name the nodes that had incidents, those with the most first."""
    numbers = Counter(each.node for each in state.incidents).most_common()
    texts = [f"{node}: {number}" for node, number in numbers[:_NAMED_MAX]]
    if len(numbers) > _NAMED_MAX:
        texts.append(f"{len(numbers) - _NAMED_MAX} more nodes")
    return ", ".join(texts)


def find_end(state: State) -> End | None:
    """Return how the run ends instead of another generation, None where it may have one."""
    if state.giving_up is not None:
        failed = state.first_failure
        text = f": rank {failed.rank}: {failed.text}" if failed else ""
        return End(status=GAVE_UP_STATUS, reason=f"a fault came before the state was saved{text}")
    if state.options.recovers:
        problem = _find_problem(state)
        return End(status=GAVE_UP_STATUS, reason=problem) if problem else None
    # The number of a generation is that of the restarts before it, whoever coordinates.
    if state.generation < max(0, state.options.restarts_max):
        return None
    failed = state.first_failure
    text = failed.text if failed else "the coordinator was lost"
    if allowed := state.options.restarts_max:
        restarts, are = (
            ("the 1 restart", "is") if allowed == 1 else (f"the {allowed} restarts", "are")
        )
        text += f"; {restarts} that trainer.max_restarts allows {are} used up"
    return End(status=failed.status if failed else 1, reason=text)


# ---- where the state lies

UNTOLD = "; no rank told of a saved state: a start begins at what its program loads, or at step 0"


def can_save(generation: Membership) -> bool:
    """Return whether some rank holds a state, and a program that saves what it holds."""
    return any(
        "saved" in each.rest and each.phase is not Phase.FRESH
        for each in generation.reports.values()
    )


def say_where(state: State) -> str:
    """Return where the newest state lies that ranks have told of; empty before the run begins."""
    saved = find_saved(state)
    if saved is None:
        is_told = state.options.recovers and state.opened >= 0
        return UNTOLD if is_told else ""
    if not saved.place:
        return "; no state is saved, so a start begins at step 0"
    return f"; the newest state known to be saved is that of step {saved.step} in {saved.place}"


def find_saved(state: State) -> LastState | None:
    """Return the newest state that ranks have told of; None where none has."""
    if state.side_save is not None and state.side_save.saved is not None:
        return state.side_save.saved
    told = [
        LastState(step=int(each.rest["saved"]), place=str(each.rest["place"]))
        for each in state.reports.values()
        if "place" in each.rest
    ]
    # What ranks tell now counts: an older state may be all that is left.
    return max(told, key=lambda each: each.step, default=state.saved)
