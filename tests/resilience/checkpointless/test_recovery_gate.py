"""The recovery suite over queues can fail: a gate that is not the right one loses steps."""

from __future__ import annotations

import pytest

from tests.resilience.checkpointless import recovery_scenarios as scenarios
from tests.resilience.checkpointless.recovery_channels import NaiveChannels, StaleChannels
from tests.resilience.checkpointless.recovery_runs import LAYOUTS
from tests.resilience.rank_processes import TIMEOUT_S

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
SHARDED = "2-replicas-x-2-shards"


def test_naive_gate_loses_a_committed_step():
    """It lets shard 0 into an update whose gate shard 1 has never entered."""
    with pytest.raises(AssertionError, match=r"no step is held for every shard: newest are "):
        scenarios.one_shard_fails_before_the_gate(NaiveChannels, SHARDED)


@pytest.mark.parametrize("place", ["reduced", "gate", "entering"])
def test_naive_gate_brings_ranks_ahead_of_the_plan(place):
    with pytest.raises(AssertionError, match=r"Fault\(rank="):
        scenarios.each_rank_fails_in_turn(NaiveChannels, SHARDED, place, is_replaced=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", scenarios.PLACES)
def test_what_an_aborted_collective_leaves_does_not_matter(layout, place):
    scenarios.each_rank_fails_in_turn(StaleChannels, layout, place, is_replaced=True)
