"""Random kills, pauses, cuts and returns of four real agents, from printed seeds.

A seed is played again by `pytest -m slow -k 'random_trace and 17'`; what was done to the agents
stands before what they said.
"""

from __future__ import annotations

import sys

import pytest

from tests.scenarios.membership.agents.conftest import MakeWorld
from tests.scenarios.membership.agents.traces import draw, play

NUM_SEEDS = 100
LEASE_S, PATIENCE_S = 0.6, 2.4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_trace_loses_nothing_and_ends_well(make_world: MakeWorld, seed: int) -> None:
    trace = draw(seed)
    sys.stdout.write(f"{trace}\n")
    world = make_world(
        num_nodes=trace.num_nodes,
        num_standby=trace.num_standby,
        num_shards=trace.num_shards,
        num_spares=trace.num_spares,
        lease_s=LEASE_S,
        **({"patience_s": PATIENCE_S} if trace.is_impatient else {}),
        has_network=trace.has_cuts,
    )

    play(trace, world)

    world.finish()
