"""Which sizes of an elastic run hold whole copies of its state."""

from __future__ import annotations

import re

import pytest

from launcher.errors import RecipeError
from launcher.job.workload import TorchTrainer
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
