"""Agents that are killed, and started again at their addresses."""

from __future__ import annotations

import pytest

from tests.cases import slow
from tests.scenarios.membership.agents.conftest import MakeWorld
from tests.scenarios.membership.agents.real_world import RealWorld, pause

LEASE_S = 1.0
AWAY_S = 2.5
"""Longer than a lease."""


def begin(make_world: MakeWorld, num_nodes: int, num_standby: int, **values: int) -> RealWorld:
    world = make_world(num_nodes=num_nodes, num_standby=num_standby, lease_s=LEASE_S, **values)
    world.start(*world.names)
    world.wait_for_progress()
    return world


def opened(world: RealWorld) -> list[int]:
    """Return the generations that have begun, in their order."""
    return list(dict.fromkeys(each.generation for each in world.history.of("resume")))


@pytest.mark.parametrize(
    ("size", "away_s"),
    [
        slow((2, 1), 0.0),
        *(slow(size, away_s) for size in ((4, 0), (3, 1), (2, 2)) for away_s in (0.0, 1.0, 20.0)),
    ],
)
def test_each_node_is_killed_and_comes_back(
    make_world: MakeWorld, size: tuple[int, int], away_s: float
) -> None:
    world = begin(make_world, *size)

    for name in world.names:
        world.kill(name)
        pause(away_s)
        world.start(name)
        world.wait_for_progress()

    world.finish()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(4, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize("survivor", ["n0", "n1", "n3"])
@pytest.mark.parametrize("away_s", [0.0, AWAY_S])
def test_all_but_one_are_killed_and_come_back(
    make_world: MakeWorld, size: tuple[int, int], survivor: str, away_s: float
) -> None:
    world = begin(make_world, *size)
    others = [name for name in world.names if name != survivor]

    world.kill(*others)
    pause(away_s)
    world.start(*others)

    world.finish()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(4, 0), (3, 1), (2, 2)])
@pytest.mark.parametrize("away_s", [0.0, AWAY_S])
def test_all_are_killed_and_begin_the_run_anew(
    make_world: MakeWorld, size: tuple[int, int], away_s: float
) -> None:
    world = begin(make_world, *size)

    world.kill(*world.names)
    pause(away_s)
    world.start(*world.names)

    world.finish()
    begun = [each for each in world.history.of("resume") if each.generation == opened(world)[-1]]
    assert opened(world)[-1] >= 100
    assert {(each.fields["step"], each.fields["role"]) for each in begun} == {(0, "started")}


@pytest.mark.slow
@pytest.mark.parametrize("size", [(2, 0), (2, 1)])
def test_newcomer_finds_the_run_while_the_first_node_is_away(
    make_world: MakeWorld, size: tuple[int, int]
) -> None:
    """All know the address of the first node alone."""
    world = make_world(num_nodes=size[0], num_standby=size[1], lease_s=LEASE_S, num_endpoints=1)
    world.start("n0")
    world.wait_until(lambda: world.num_joined("n0") == 1, "the first node is there")
    world.start(*world.names)
    world.wait_for_progress()

    world.kill("n0")
    world.start("newcomer")
    world.wait_for_progress()
    world.start("n0")

    world.finish()
