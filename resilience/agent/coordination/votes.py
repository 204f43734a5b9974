"""Rules for the coordinator: which side of a broken run may go on, whose place is free. Pure.

The gate needs all ranks, so a generation is over as soon as one member's workers have left it. Two
worlds can come only from two successors without a common member, or from one with no member at
all. So a successor has more than half of the members; exactly half have it where they win the
record of its number in a folder that all see, or else hold place 0; fewer only where every other
agent that was ever heard of has ended for certain, and the run's record, read behind the last of
these ends, names nobody else: whoever stood still for a while does not know who has come since.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from resilience.agent.coordination.events import Ended
from resilience.agent.coordination.membership import Agreement, Membership, Roster, Stage, State
from resilience.comm.messages import Ballot
from resilience.state.layout import Layout
from resilience.state.report import SHARDS, Phase

GOES_ON = "goes on"
TIE = "tie"
WAITS = "waits"

HOLDS_NONE = (Phase.FRESH, Phase.TORN_UPDATE, Phase.TORN_REPAIR)
"""Phases of ranks whose memory counts as nothing."""


def next_ballot(newest: Ballot, start: str) -> Ballot:
    """Return one that comes after another one, and is this agent's alone."""
    return newest[0] + 1, start


def in_later_ballot(state: State, *promised: Ballot) -> State:
    """Return the coordinator in a ballot of its own behind its last one and what was promised."""
    return replace(state, ballot=next_ballot(max([state.ballot, *promised]), state.ballot[1]))


def find_verdict(state: State) -> str:
    """Return whether the agents at hand may open the next generation."""
    if not state.options.recovers:
        # No standby takes a place: all members come back, or the run ends.
        return GOES_ON
    members = set(state.members.nodes)
    here = len(members & state.voters)
    if 2 * here > len(members):
        return GOES_ON
    are_alone = _are_alone(state)
    if not are_alone and 2 * here < len(members):
        return WAITS
    if state.shares_folder:
        return TIE
    return GOES_ON if are_alone or state.members.nodes[0] in state.voters else WAITS


def find_ended(roster: Roster) -> Ended:
    """Return whose end is known: the record counts that was read behind these."""
    return frozenset((name, roster.starts.get(name, "")) for name in roster.dead | roster.gone)


def lacks_reading(state: State) -> bool:
    """Return whether all others have ended as far as is known, and the record may name more."""
    is_read = not state.shares_folder or state.read_after == find_ended(state)
    return not is_read and not _find_away(state)


def _are_alone(state: State) -> bool:
    """Return whether nobody else may go on for certain."""
    return not _find_away(state) and not lacks_reading(state)


def _find_away(state: State) -> set[str]:
    """Return the agents that may live on, and are not at hand with what they held.

    One that has said goodbye here may have come back to others, as another start.
    """
    members = set(state.members.nodes)
    back = {
        name
        for name, start in state.recorded_starts.items()
        if state.starts.get(name, start) != start
    }
    everybody = state.known | state.recorded_starts.keys()
    strangers = everybody - state.present.keys() - (state.gone - back)
    return (members - state.voters - state.dead) | strangers


def find_doubted(state: State) -> dict[str, frozenset[str]]:
    """Return the silent agents of which an end would change what may be done, with their starts.

    A start that is not the newest has ended where the newest has; which that is nobody may know.
    """
    if state.stage != Stage.STOPPING or not state.options.recovers:
        return {}
    layout = state.members
    members = dict(zip(layout.nodes, layout.starts, strict=False))
    return {
        name: frozenset(
            {each.get(name, "") for each in (members, state.starts, state.recorded_starts)} - {""}
        )
        for name in sorted(_find_away(state) - state.present.keys())
    }


def goes_by_evidence(state: State) -> bool:
    """Return whether these agents go on only because all others have ended.

    They are fewer than could refuse another successor, or the half that could not have gone on.
    """
    if not state.options.recovers or not _are_alone(state):
        return False
    missing = len(state.members.nodes) - 2 * len(state.voters)
    is_first_here = state.members.nodes[0] in state.voters
    is_other_half = differs_from_record(state) if state.shares_folder else not is_first_here
    return missing > 0 or (missing == 0 and is_other_half)


def find_newest(agreement: Agreement) -> Layout | None:
    """Return the members that somebody has agreed to last.

    They may have come about with others: nothing else can follow this generation then.
    """
    newest = max(agreement.accepted.values(), key=lambda each: each[0], default=None)
    return None if newest is None else newest[1]


def differs_from_record(agreement: Agreement) -> bool:
    """Return whether the record is of other members than those that somebody has agreed to."""
    record, newest = agreement.record, find_newest(agreement)
    return record is not None and newest is not None and record != newest


def find_given(state: State, *, is_late: bool) -> set[int]:
    """Return the places of members that are not at hand which may be filled.

    A silent one may be the last that holds a shard: then there is time for it to come back.
    """
    empty = {place for place, node in enumerate(state.nodes) if node is None} - state.awaited
    if is_late or state.is_stateless or not state.options.recovers:
        return empty
    ended = {place for place in empty if state.members.nodes[place] in state.dead}
    if ended == empty:
        return empty
    here = {node for node in state.nodes if node is not None}
    return empty if find_held(state, here) >= find_shards(state) else ended


def find_shards(generation: Membership) -> set[str]:
    """Return the shards of a copy: as the ranks' program says, else as the layout does."""
    told = max((int(each.rest.get(SHARDS, 0)) for each in generation.reports.values()), default=0)
    if told == 1:
        return {""}
    return {str(each) for each in range(told)} or {*generation.members.shards}


def find_held(generation: Membership, nodes: Collection[str]) -> set[str]:
    """Return of which shards ranks of these nodes hold something."""
    wanted = {*nodes}
    return {
        report.shard
        for place, node in enumerate(generation.nodes)
        if node in wanted
        for rank in generation.members.ranks_of(place)
        if (report := generation.reports.get(rank)) is not None
        if report.phase not in HOLDS_NONE and report.is_healthy
    }
