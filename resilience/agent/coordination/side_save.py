"""Save of the newest whole state by nodes whose coordinator may not open a generation. Pure.

They may be the smaller side of a broken network, and others may go on meanwhile. So no step is
taken, no rank changes what it holds, and the state is saved under a name that no other side gives:
it is one of the run's own past, whoever goes on. Each shard is saved by one rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from resilience.agent.coordination.counters import find_saved
from resilience.agent.coordination.events import Action, Note, Send, warn
from resilience.agent.coordination.membership import Decision, LastState, SideSave, State
from resilience.agent.coordination.votes import HOLDS_NONE
from resilience.comm.messages import SaveState, StateSaved
from resilience.state.report import Report

_Version = tuple[int, int]
"""A step, and the generation that has made it."""


def begin_save(state: State, now_s: float) -> Decision:
    """Have ranks save what they hold, where they hold a state that is not saved yet."""
    empty = SideSave(since_s=now_s, is_over=True)
    holders = _find_holders(state)
    if not holders:
        # No rank has a state, or their program saves none.
        return replace(state, side_save=empty), []
    whole = _find_whole(state, holders)
    if not whole:
        newest = max(holders)
        missing = ", ".join(each or "0" for each in _find_missing(state, holders[newest]))
        problem = f"of step {newest[0]} nobody here holds shard {missing}"
        return _end(replace(state, side_save=empty), problem)
    step, step_generation = version = max(whole)
    saved = find_saved(state)
    if saved is not None and saved.step >= step:
        return replace(state, side_save=empty), []
    asked = {rank: shard for shard, rank in holders[version].items()}
    first = state.nodes[state.members.seat(min(asked)).node_index]
    name = f"{step_generation}-{state.present[str(first)].start}"
    actions: list[Action] = [
        Send(
            node=str(state.nodes[state.members.seat(rank).node_index]),
            message=SaveState(
                generation=state.generation,
                rank=rank,
                step=step,
                step_generation=step_generation,
                name=name,
            ),
        )
        for rank in sorted(asked)
    ]
    return replace(
        state, side_save=SideSave(since_s=now_s, step=step, name=name, asked=asked)
    ), actions


def holds_whole(state: State) -> bool:
    """Return whether ranks that have reported hold all shards of a state."""
    return bool(_find_whole(state, _find_holders(state)))


def _find_whole(state: State, holders: dict[_Version, dict[str, int]]) -> list[_Version]:
    return [each for each in holders if not _find_missing(state, holders[each])]


def _find_holders(state: State) -> dict[_Version, dict[str, int]]:
    """Return for each state that is held here the first rank that holds each shard of it."""
    found: dict[_Version, dict[str, int]] = defaultdict(dict)
    digests: dict[tuple[_Version, str], set[str]] = defaultdict(set)
    for rank in sorted(state.reports):
        report = state.reports[rank]
        if not _holds_state(report) or "saved" not in report.rest:
            continue
        version = (report.step, report.step_generation)
        found[version].setdefault(report.shard, rank)
        if report.digest is not None:
            digests[version, report.shard].add(report.digest)
    for (version, shard), different in digests.items():
        if len(different) > 1:
            # One of them has changed, and here nobody can tell which.
            del found[version][shard]
    return dict(found)


def _holds_state(report: Report) -> bool:
    is_member = report.member_generation == report.generation
    return report.phase not in HOLDS_NONE and report.is_healthy and is_member


def _find_missing(state: State, holders: dict[str, int]) -> list[str]:
    return [each for each in state.members.shards if each not in holders]


def note_saved(state: State, node: str, said: StateSaved, now_s: float) -> Decision:
    """Take in what came of it on one rank; when all have said so it is over."""
    save = state.side_save
    if save is None or save.is_over or said.name != save.name or said.rank not in save.asked:
        return state, []
    save = replace(save, said={**save.said, said.rank: said})
    return _settle(replace(state, side_save=save))


def is_saving(state: State) -> bool:
    """Return whether ranks are saving."""
    return state.side_save is not None and not state.side_save.is_over


def check_save(state: State, now_s: float) -> Decision:
    """End a save that takes too long, or whose ranks are gone."""
    save = state.side_save
    if save is None or save.is_over:
        return state, []
    limit_s = state.options.last_save_deadline_s
    if now_s - save.since_s >= limit_s:
        ranks = ", ".join(str(rank) for rank in sorted(save.asked.keys() - save.said.keys()))
        return _end(state, f"rank {ranks} did not save its part within {limit_s:g} s")
    return _settle(state)


def _settle(state: State) -> Decision:
    save = state.side_save
    assert save is not None
    if any(rank in state.reports for rank in save.asked.keys() - save.said.keys()):
        return state, []
    said = [save.said.get(rank) for rank in save.asked]
    places = {each.part if each else "" for each in said}
    if len(places) > 1 or "" in places:
        problems = [f"rank {each.rank}: {each.problem}" for each in said if each and each.problem]
        return _end(state, problems[0] if problems else "its parts did not come together")
    saved = LastState(step=save.step, place=places.pop())
    note = Note(event="state_saved", fields={"saved_step": saved.step, "place": saved.place})
    return replace(state, side_save=replace(save, is_over=True, saved=saved)), [note]


def _end(state: State, problem: str) -> Decision:
    assert state.side_save is not None
    save = replace(state.side_save, is_over=True, problem=problem)
    warning = warn(f"what these nodes hold was not saved: {problem}")
    return replace(state, side_save=save), [warning]


def say_problem(state: State) -> str:
    """Return why nothing was saved, for the run's last words; empty where there is no reason."""
    save = state.side_save
    return f"; what is held here was not saved: {save.problem}" if save and save.problem else ""
