"""What crosses within milliseconds or is long past: traces that random ones seldom have."""

from __future__ import annotations

import pytest

from resilience.agent.coordination.membership import AGREEING
from tests.resilience.agent.membership import simulation
from tests.resilience.agent.membership.simulation import SimNode, World

INSTANT_S = 0.00001


def begin(num_nodes: int, num_standby: int, **options: bool) -> tuple[World, SimNode, list[str]]:
    """Return a world that trains, its coordinator, and all names, members first."""
    world = World(3, num_nodes=num_nodes, num_standby=num_standby, **options)
    world.run(30)
    (leader,) = (node for node in world.nodes.values() if node.party.state)
    members = leader.opening.layout.nodes if leader.opening else ()
    assert members[0] == leader.name
    return world, leader, [*members, *(name for name in world.names if name not in members)]


def test_standby_node_that_agreed_to_a_lost_coordinator_agrees_to_the_next_one() -> None:
    """The members know nothing of that proposal, and the silent one is back by then."""
    world, leader, (first, second, third, standby) = begin(3, 1)
    world.network.cut([third], [first, second, standby], is_silent=True)
    while leader.party.state is None or leader.party.state.stage != AGREEING:
        world.run(INSTANT_S)
    world.network.cut([first], [second], is_silent=True)
    while world.nodes[standby].standing.agreed is None:
        world.run(INSTANT_S)
    world.network.cut([first], [standby], is_silent=True)
    world.kill(first)
    world.network.reset([first], [second, standby])
    world.network.heal(world.names, world.names)
    num_steps = world.steps

    world.run(40)

    assert world.steps > num_steps


def test_standby_node_that_was_silent_may_have_gone_on_with_those_that_are_cut_off() -> None:
    """Once heard of, it is never forgotten: what has no majority waits for word of it."""
    world, _, (first, second, standby) = begin(2, 1, shares_folder=False)
    world.pause(standby)
    world.run(8)
    world.network.cut([second], [first, standby], is_silent=True)
    world.resume(standby)
    world.run(12)
    num_steps = world.steps
    world.network.cut([standby], [first, second], is_silent=True)
    world.kill(first)
    world.network.heal([first], [second])
    world.start(first)

    # Each commit is held against those before it.
    world.run(30)
    assert world.steps == num_steps
    world.network.heal(world.names, world.names)
    world.run(20)
    assert world.steps > num_steps


def test_side_that_gives_up_does_not_call_the_run_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agents are started again, and the other half goes on meanwhile."""
    monkeypatch.setattr(simulation, "PATIENCE_S", 20.0)
    world, _, (first, second, third, fourth) = begin(2, 2)
    world.network.cut([first, third], [second, fourth], is_silent=True)
    while sum(node.end is not None for node in world.nodes.values()) < 2:
        world.run(1)
    ended = [name for name in world.names if world.nodes[name].end]
    assert ended in ([first, third], [second, fourth])
    for name in ended:
        world.kill(name)
        world.start(name)

    # Each commit is held against those before it.
    world.run(30)
    num_steps = world.steps
    world.network.heal(world.names, world.names)
    world.run(20)
    assert world.steps > num_steps
