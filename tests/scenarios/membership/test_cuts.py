"""Nodes that a network cuts off, for a while or for ever, and what becomes of their run.

Each node is a host of its own; the folder of the run is on a file system that all of them see.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.membership.clusters import (
    BATCHES,
    Cluster,
    MakeNetwork,
    check_outcome,
    start_cluster,
)
from tests.scenarios.recovery.conftest import Undisturbed
from tests.scenarios.recovery.runs import FaultOutcome

NUM_STEPS = 100
NUM_SLOW_STEPS = 30


def bits(undisturbed: Undisturbed, num_ranks: int, max_steps: int = NUM_STEPS) -> FaultOutcome:
    return undisturbed(max_steps=max_steps, num_devices=num_ranks, values=BATCHES)


def ending_nodes(outcome: FaultOutcome) -> set[str]:
    """Return the nodes that were members at the end."""
    return {each.node for each in outcome.named("state_digest")}


def come_back(cluster: Cluster, nodes: set[str]) -> FaultOutcome:
    """Heal the network, and let the run end once those that were cut off are back."""
    cluster.wait_for_return(nodes, cluster.heal())
    return cluster.finish()


@pytest.mark.slow
def test_run_over_a_slow_network_that_loses_packets_has_the_undisturbed_bits(
    tmp_path: Path, make_network: MakeNetwork, undisturbed: Undisturbed
) -> None:
    network = make_network(3, delay_s=0.02, loss=0.01)
    with start_cluster(tmp_path, network, (2, 1), max_steps=NUM_SLOW_STEPS) as cluster:
        outcome = cluster.finish()

    assert outcome.statuses == [0, 0, 0], cluster.run.log()
    check_outcome(outcome, bits(undisturbed, 2, NUM_SLOW_STEPS))
    assert not outcome.named("node_lost")
    assert len(outcome.named("generation_opened")) == 1


def test_member_that_was_cut_off_is_a_standby_node_again(
    tmp_path: Path, make_network: MakeNetwork, undisturbed: Undisturbed
) -> None:
    with start_cluster(
        tmp_path, make_network(3), (2, 1), max_steps=NUM_STEPS, lease_s=1.0
    ) as cluster:
        cluster.begin()
        lost = cluster.choose("member")
        cluster.wait_for_generation(cluster.cut(lost))
        outcome = come_back(cluster, {lost})

    assert outcome.statuses == [0, 0, 0], cluster.run.log()
    check_outcome(outcome, bits(undisturbed, 2))
    assert lost not in ending_nodes(outcome)


@pytest.mark.slow
def test_half_with_the_record_goes_on(
    tmp_path: Path, make_network: MakeNetwork, undisturbed: Undisturbed
) -> None:
    """Each half has one of two members, and a standby node for the other."""
    with start_cluster(tmp_path, make_network(4), (2, 2), max_steps=NUM_STEPS) as cluster:
        cluster.begin()
        members = cluster.members()
        standby = [node for node in cluster.nodes if node not in members]
        halves = [set(pair) for pair in zip(members, standby, strict=True)]
        opened = cluster.wait_for_generation(cluster.split(halves[0]))
        outcome = come_back(cluster, next(half for half in halves if opened.node not in half))

    assert outcome.statuses == [0, 0, 0, 0], cluster.run.log()
    check_outcome(outcome, bits(undisturbed, 2))
    (winners,) = (half for half in halves if opened.node in half)
    assert ending_nodes(outcome) == winners
    records = sorted(each.name for each in (tmp_path / "generations").glob("0-*"))
    # Of run 0, in its first attempt.
    assert records == [f"0-0-{opened.fields['number']}"]
