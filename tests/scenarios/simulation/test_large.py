"""A run of a thousand nodes is founded, broken and gone on with, in one process."""

from __future__ import annotations

import pytest

from tests.scenarios.simulation.simulation import World

NUM_NODES = 1024
NUM_LOST = 50


@pytest.mark.slow
def test_a_thousand_agents_go_on_without_fifty_and_their_coordinator() -> None:
    world = World(1, num_nodes=NUM_NODES, num_standby=NUM_LOST + 1)
    world.grain_s = 0.02
    run_until_committed(world, 0)
    (leader,) = (name for name in world.names if world.nodes[name].member.state is not None)
    members = [name for name in world.committed[-1][1].nodes if name != leader]
    lost = [leader, *members[:NUM_LOST]]
    for name in lost:
        world.kill(name)

    run_until_committed(world, world.steps)

    _, layout, _ = world.committed[-1]
    assert len(layout.nodes) == NUM_NODES
    assert not {*layout.nodes} & {*lost}


def run_until_committed(world: World, num_steps: int) -> None:
    """Let time pass until a step is committed behind so many."""
    for _ in range(600):
        world.run(0.1)
        if world.steps > num_steps:
            return
    raise AssertionError(world.describe())
