"""Which side of a broken run may go on, and whose place may be given away. Pure.

The gate needs all ranks, so a generation is over as soon as one member's workers have left it. Two
worlds can come only from two successors without a common member, or from one with no member at
all. So a successor has more than half of the members; exactly half have it where they win the
record of its number in a folder that all see, or else hold place 0; fewer only where every other
agent that was ever heard of has ended for certain.
"""

from __future__ import annotations

from resilience.agent.coordination.membership import State
from resilience.state.report import Phase

GOES_ON = "goes on"
TIE = "tie"
WAITS = "waits"


def find_verdict(state: State) -> str:
    """Return whether the agents at hand may open the next generation."""
    if not state.options.recovers:
        # No standby takes a place: all members come back, or the run ends.
        return GOES_ON
    members = set(state.members.nodes)
    here = len(members & state.voters)
    if 2 * here > len(members):
        return GOES_ON
    away = (members - state.voters - state.dead) | (state.known - state.present.keys() - state.gone)
    if away and 2 * here < len(members):
        return WAITS
    if state.shares_folder:
        return TIE
    return GOES_ON if not away or state.members.nodes[0] in state.voters else WAITS


def goes_by_evidence(state: State) -> bool:
    """Return whether fewer go on than could refuse another successor."""
    return state.options.recovers and 2 * len(state.voters) < len(state.members.nodes)


def may_give_away(state: State, place: int, *, is_late: bool) -> bool:
    """Return whether the place of a member that is not at hand may be filled.

    A silent one may be the last that holds a shard: then there is time for it to come back.
    """
    if place in state.awaited:
        return False
    if state.members.nodes[place] in state.dead or is_late or not state.options.recovers:
        return True
    return state.is_stateless or _hold_all_shards(state)


def _hold_all_shards(state: State) -> bool:
    held = {
        report.shard
        for report in state.reports.values()
        if report.phase not in _HOLDS_NONE and report.is_healthy
    }
    layout = state.members
    return held >= {layout.seat(rank).shard for rank in range(layout.num_shards)}


_HOLDS_NONE = (Phase.FRESH, Phase.TORN_UPDATE, Phase.TORN_REPAIR)
