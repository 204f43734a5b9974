"""What the ranks of a generation hold where the one before it had another number of nodes. Pure.

A node's workers keep their local ranks and their shards, so what each holds goes with it to its
new rank. Who comes in holds nothing. What ranks say that take no part any more is evidence: of a
gate that was passed, and of which digest is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from resilience.checkpointless.plan import Fallback, RecoveryPlan, plan_recovery
from resilience.state.layout import Layout
from resilience.state.report import Phase, Report, fresh_report


def plan_resize(
    reports: Sequence[Report], *, before: Layout, after: Layout
) -> RecoveryPlan | Fallback:
    """Decide how the ranks of `after` get their state from what those of `before` hold.

    There is one report for each rank of `before`, where it is lost a fresh one. The plan's ranks
    are those of `after`.
    """
    members, others = renumber(reports, before=before, after=after)
    return plan_recovery([*members, *others], num_members=len(members))


def renumber(
    reports: Sequence[Report], *, before: Layout, after: Layout
) -> tuple[list[Report], list[Report]]:
    """Return the reports of the ranks of `after`, and behind them those of ranks that are none."""
    known = {report.rank: report for report in reports}
    (generation,) = {report.generation for report in reports}
    members = []
    for rank in range(after.world_size):
        old = _find_rank(rank, before=before, after=after)
        report = known.pop(old) if old is not None else None
        if report is None or report.phase is Phase.FRESH:
            members.append(fresh_report(after, rank, generation))
        else:
            members.append(replace(report, rank=rank, replica=after.seat(rank).replica))
    left = [known[rank] for rank in sorted(known) if known[rank].phase is not Phase.FRESH]
    others = [replace(report, rank=rank) for rank, report in enumerate(left, start=len(members))]
    return members, others


def _find_rank(rank: int, *, before: Layout, after: Layout) -> int | None:
    """Return which rank of `before` the process of a rank of `after` had with the same shard."""
    seat = after.seat(rank)
    start = after.starts[seat.node_index] if after.starts else ""
    place = before.place_of(seat.node, start)
    if place < 0:
        return None
    old = before.ranks_of(place)[seat.local_rank]
    return old if before.seat(old).shard == seat.shard else None
