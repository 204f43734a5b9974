"""Agents that stand still while their workers go on."""

from __future__ import annotations

import signal

import pytest

from tests.scenarios.membership.agents.conftest import MakeWorld
from tests.scenarios.membership.agents.real_world import RealWorld, pause

SHORT_S = 0.3


def stand_still(world: RealWorld, name: str) -> None:
    world.stand_still(name)
    pause(3 * world.lease_s)
    world.go_on(name)
    world.wait_for_progress()


@pytest.mark.parametrize("num_standby", [0, 1])
def test_agent_that_stands_still_comes_back(make_world: MakeWorld, num_standby: int) -> None:
    """All groups of them and more sizes are in `simulation/test_simulation.py`."""
    world = make_world(num_nodes=2, num_standby=num_standby, lease_s=SHORT_S)
    world.start(*world.names)
    world.wait_for_progress()

    stand_still(world, "n0")

    world.finish()


def test_standby_node_that_loses_its_worker_meanwhile_comes_back(make_world: MakeWorld) -> None:
    """It is told to whom to go before it has another one."""
    world = make_world(num_nodes=1, num_standby=1, lease_s=SHORT_S)
    world.start("n0")
    world.wait_until(lambda: world.num_joined("n0") == 1, "the first node is there")
    world.start("n1")
    world.wait_for_progress()

    world.stand_still("n1")
    world.kill_worker("n1")
    pause(3 * SHORT_S)
    world.go_on("n1")

    world.finish()


def test_worker_of_a_standby_node_that_does_not_end_fails_nothing(make_world: MakeWorld) -> None:
    """It was a member's, and holds nothing that anybody needs."""
    world = make_world(num_nodes=2, num_standby=1, lease_s=SHORT_S)
    world.start(*world.names)
    world.wait_for_progress()
    stand_still(world, "n0")

    world.kill_worker("n0", signal.SIGSTOP)

    world.finish()


@pytest.mark.parametrize(
    ("num_standby", "silent"),
    [
        pytest.param(1, ("n0",), id="alone"),
        pytest.param(2, ("n0", "n3"), id="enough-to-go-on"),
    ],
)
def test_node_that_was_silent_as_the_run_finished_has_finished(
    make_world: MakeWorld, num_standby: int, silent: tuple[str, ...]
) -> None:
    """Whether the others have ended for certain by then or not."""
    world = make_world(num_nodes=2, num_standby=num_standby, lease_s=SHORT_S)
    world.start(*world.names)
    world.wait_for_progress()
    world.stand_still(*silent)
    world.wait_for_progress()

    world.finish(later=silent)
