"""Agents that are killed, and started again at their addresses."""

from __future__ import annotations

import pytest

from tests.scenarios.membership.agents.conftest import MakeWorld

LEASE_S = 1.0


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
