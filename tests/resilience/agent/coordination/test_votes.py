"""Places of lost nodes that may be filled, by the shards that the others hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from resilience.agent.coordination.membership import Options, Stage, State
from resilience.agent.coordination.votes import find_given
from resilience.state.layout import make_layout
from resilience.state.report import SHARDS, Phase, Report

NODES = ("n0", "n1", "n2", "n3")


@pytest.mark.parametrize("is_told", [True, False], ids=["by the program", "by its option"])
@pytest.mark.parametrize(("lost", "given"), [((3,), {3}), ((1, 2), {1, 2}), ((1, 3), set())])
def test_place_is_given_away_where_the_others_hold_all_shards(
    lost: Collection[int], given: set[int], *, is_told: bool
) -> None:
    """Of a copy on two nodes. A program may have shards that the agents were not told of."""
    true = make_layout(nodes=NODES, num_local_ranks=2, num_shards=4)
    known = make_layout(nodes=NODES, num_local_ranks=2) if is_told else true
    reports = {
        rank: Report(
            rank=rank,
            node=NODES[rank // 2],
            generation=0,
            shard=true.seat(rank).shard,
            phase=Phase.COMPUTING,
            rest={SHARDS: 4} if is_told else {},
        )
        for rank in range(8)
        if rank // 2 not in lost
    }
    begun = State(
        options=Options(num_nodes=4, num_local_ranks=2), stage=Stage.STOPPING, layout=known
    )
    nodes = tuple(None if place in lost else name for place, name in enumerate(NODES))

    assert find_given(replace(begun, nodes=nodes, reports=reports), is_late=False) == given
