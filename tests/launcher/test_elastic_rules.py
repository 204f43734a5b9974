"""Which sizes of an elastic run hold whole copies of its state."""

from __future__ import annotations

import re

import pytest

from launcher.errors import RecipeError
from launcher.job.workload import TorchTrainer
from tests.launcher.k8s_job import TINY, documents
from tests.launcher.shipped import shipped_job
from training.plan import plan_mesh

RECIPE = "llama/llama3_tiny_elastic"
HYBRID = ("trainer.order_of_sums=size", "trainer.sharding=hybrid", "trainer.num_nodes=4")
FOUR_WORKERS = ("trainer.num_devices=4", "trainer.num_replicas=8", "trainer.micro_batch_size=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            ["trainer.order_of_sums=size", "trainer.sharding=full"],
            "trainer.sharding 'full' does not fit resilience.elastic with "
            "resilience.checkpointless: its one copy of the state lies on all nodes; allowed: "
            "'none', or 'hybrid' with a copy on each node",
            id="one-copy",
        ),
        pytest.param(
            ["resilience.elastic.nodes_allowed=[]"],
            "resilience.elastic.nodes_allowed",
            id="no-size",
        ),
        pytest.param(
            [*HYBRID, "trainer.num_replicas=2", "resilience.elastic.nodes_min=2",
             "resilience.elastic.nodes_step=2"],
            "trainer.num_replicas 2 does not fit resilience.elastic with "
            "resilience.checkpointless: the 2 ranks of a copy are on several nodes, and "
            "trainer.num_devices is 1; allowed: as many copies as nodes, or a multiple of it",
            id="copies-of-two-nodes",
        ),
        pytest.param(
            [*HYBRID, "trainer.num_replicas=2"],
            "resilience.elastic allows 1 nodes, and there 1 ranks do not divide by the 2 that hold "
            "a copy; sizes that fit: 2, 4, to be set as resilience.elastic.nodes_allowed",
            id="half-a-copy",
        ),
    ],
)  # fmt: skip
def test_a_size_that_holds_no_whole_copies_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        shipped_job(RECIPE, "local", overrides)
    assert "sizes that fit: 3" not in str(caught.value)


def test_copies_follow_the_number_of_nodes() -> None:
    job = shipped_job(RECIPE, "local", [*HYBRID, *FOUR_WORKERS])
    trainer = job.trainer
    assert isinstance(trainer, TorchTrainer)

    copies = [trainer.at_size(num_nodes).replicas for num_nodes in (1, 3, 4)]
    meshes = [plan_mesh(trainer, num_nodes * 4) for num_nodes in (1, 3, 4)]

    assert copies == [2, 6, 8]
    assert [each and each.sizes for each in meshes] == [(2, 2), (6, 2), (8, 2)]


ON_HYPERPOD = "resilience.elastic with cluster.job_kind 'hyperpod'"
RESTARTS = (
    "cluster.run_policy.restart_policy={eval_period_s: 60, full_job_restarts_max: null, "
    "restarts_before_full_job: null, repeat_offenders_to_avoid_max: null, scale_up_snooze_s: 9}"
)
NO_STORE = (
    f"does not fit {ON_HYPERPOD}, where a start at another size finds the state in a store of ours "
    "alone; allowed: resilience/tiered=run_folder, folder, s3 or store"
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["resilience.tiered=null"], f"resilience.tiered null {NO_STORE}", id="tiers"),
        pytest.param(
            ["resilience/tiered=ram"], f"resilience.tiered.store null {NO_STORE}", id="store"
        ),
        pytest.param(
            ["resilience/tiered=aws"], f"resilience.tiered.backend 'aws' {NO_STORE}", id="aws"
        ),
        pytest.param(
            ["resilience/tiered=ram_s3"],
            f"resilience.tiered.ram.replicas 1 does not fit {ON_HYPERPOD}, where no node's memory "
            "reaches another's; allowed: 0",
            id="replicas",
        ),
        pytest.param(
            ["trainer.sharding=full"],
            f"trainer.sharding 'full' does not fit {ON_HYPERPOD}: its one copy of the state lies "
            "on all nodes; allowed: 'none', or 'hybrid' with a copy on each node",
            id="one-copy",
        ),
        pytest.param(
            [RESTARTS],
            "cluster.run_policy.restart_policy.scale_up_snooze_s 9 is set by "
            "resilience.elastic.scale_up_snooze_s 60 with resilience.elastic; allowed: null",
            id="two-snoozes",
        ),
    ],
)  # fmt: skip
def test_what_hyperpod_cannot_start_at_another_size_is_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        shipped_job(TINY, "hyperpod", ["resilience/elastic=default", *overrides])


def test_daemons_of_a_job_that_hyperpod_resizes_know_no_other() -> None:
    """The operator says nobody by which name its pods are reached, and their number changes."""
    job = shipped_job(TINY, "hyperpod", ["resilience/elastic=default"])

    found = documents(job)["ConfigMap"]["data"]

    assert "memoryd.peers" not in found
    assert "--peer" not in found["memoryd.sh"]
    assert "--config=/etc/training/node.json" in found["memoryd.sh"]
