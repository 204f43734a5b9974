"""Which sizes of an elastic run hold whole copies of its state."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from launcher.errors import RecipeError
from launcher.job.workload import TorchTrainer
from launcher.support import notes
from recipes_training.plan import plan_mesh
from recipes_training.steplog import tell_idle
from resilience.events import EventLog, read_events
from tests.launcher.k8s_job import TINY, documents
from tests.launcher.shipped import rendered, shipped_job

RECIPE = "llama/llama3_tiny_elastic"
HYBRID = ("trainer.order_of_sums=size", "trainer.sharding=hybrid", "trainer.num_nodes=4")
FOUR_WORKERS = ("trainer.num_devices=4", "trainer.num_replicas=8", "trainer.micro_batch_size=1")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.order_of_sums=size", "trainer.sharding=full"],
         ("trainer.sharding 'full' does not fit resilience.elastic with "
          "resilience.checkpointless: its one copy of the state lies on all nodes; allowed: "
          "'none', or 'hybrid'")),
        (["resilience.elastic.nodes_allowed=[]"], "resilience.elastic.nodes_allowed"),
        (["resilience.elastic.nodes_allowed=[1,3,3]"],
         ("resilience.elastic.nodes_allowed [1, 3, 3] names 3 more than once; allowed: each size "
          "once, as [1, 3]")),
        (["resilience.elastic.nodes_allowed=[1,3,9]"],
         ("resilience.elastic.nodes_allowed [9] is outside nodes_min 1 to nodes_max 4; leave it "
          "out, or change them")),
        (["resilience.elastic.nodes_allowed=[2,3]"],
         ("resilience.elastic.nodes_min 1 is none of resilience.elastic.nodes_allowed [2, 3]; "
          "set it to 2")),
        (["resilience.elastic.nodes_step=2"],
         ("resilience.elastic.nodes_step 2 does not lead from nodes_min 1 to nodes_max 4; "
          "allowed: 1, 3")),
        (["resilience.elastic.nodes_min=5"],
         ("resilience.elastic.nodes_min 5 is more than resilience.elastic.nodes_max 4; allowed: "
          "at most 4")),
        (["trainer.num_nodes=5"],
         ("trainer.num_nodes 5 is outside resilience.elastic.nodes_min 1 to nodes_max 4; set it "
          "within them, or change them")),
        (["resilience.elastic.nodes_step=1", "resilience.elastic.nodes_allowed=[1,3]"],
         ("resilience.elastic.nodes_step 1 and resilience.elastic.nodes_allowed [1, 3] exclude "
          "each other; set one of them to null")),
        (["trainer.global_batch_size=8"],
         ("trainer.global_batch_size 8 has 2 micro batches of trainer.micro_batch_size 4, fewer "
          "than the 3 data-parallel ranks; allowed: at least 12")),
        ([*HYBRID, "trainer.num_nodes=3", "trainer.num_devices=4", "trainer.num_replicas=2",
          "resilience.elastic.nodes_min=3", "resilience.elastic.nodes_max=3"],
         ("trainer.num_replicas 2 does not fit resilience.elastic with "
          "resilience.checkpointless: the 6 ranks of a copy take a part of a node with "
          "trainer.num_devices 4; allowed: copies of whole nodes, or nodes with whole copies")),
        ([*HYBRID, "trainer.num_replicas=2"],
         ("resilience.elastic allows 3 nodes, and there 3 ranks do not divide by the 2 that hold "
          "a copy; sizes that fit: 2, 4, to be set as resilience.elastic.nodes_allowed")),
    ],
)  # fmt: skip
def test_a_size_that_holds_no_whole_copies_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        shipped_job(RECIPE, "local", overrides)
    assert "sizes that fit: 3" not in str(caught.value)


def test_a_copy_may_take_several_nodes() -> None:
    files = rendered(
        shipped_job(
            RECIPE,
            "local",
            [*HYBRID, "trainer.num_replicas=2", "resilience.elastic.nodes_min=2",
             "resilience.elastic.nodes_step=2"],
        )
    )  # fmt: skip

    agent = json.loads(files["node.json"])["agent"]
    assert (agent["shards"], agent["sizes"]) == (2, [2, 4])


def test_sizes_may_be_written_in_any_order() -> None:
    overrides = ["resilience.elastic.nodes_allowed=[4,1,3]"]
    elastic = shipped_job(RECIPE, "local", overrides).resilience.elastic
    files = rendered(shipped_job(RECIPE, "hyperpod", overrides))

    assert elastic is not None
    assert elastic.sizes == (1, 3, 4)
    (job,) = [each for each in yaml.safe_load_all(files["manifest.yaml"])
              if each["kind"] == "HyperPodPyTorchJob"]  # fmt: skip
    assert job["spec"]["elasticPolicy"]["replicaDiscreteValues"] == [1, 3, 4]


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([], None),
        (
            ["trainer.global_batch_size=64"],
            (
                "16 micro batches of a step leave the 3 data-parallel ranks of 3 nodes idle for "
                "11% of the time; trainer.global_batch_size 72 would not"
            ),
        ),
        (
            ["trainer.global_batch_size=20"],
            (
                "5 micro batches of a step leave the 4 data-parallel ranks of 4 nodes idle for 38% "
                "of the time, and for more than 10% on 2, 3; trainer.global_batch_size 44 would not"
            ),
        ),
        (
            ["trainer.global_batch_size=20", "resilience.elastic.nodes_allowed=[1,3]"],
            (
                "5 micro batches of a step leave the 3 data-parallel ranks of 3 nodes idle for 17% "
                "of the time; trainer.global_batch_size 24 would not"
            ),
        ),
    ],
)
def test_sizes_at_which_ranks_wait_are_noted(overrides: list[str], note: str | None) -> None:
    found = notes(shipped_job(RECIPE, "local", overrides))

    assert found == ([note] if note else [])


def test_a_worker_says_at_which_size_ranks_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = shipped_job(RECIPE, "local", ["trainer.global_batch_size=64"])
    with EventLog(tmp_path / "events.jsonl", node="n0", rank=0, generation=1) as events:
        for num_nodes in (4, 3):
            tell_idle(job, num_nodes, events)

    text = "16 micro batches of a step leave the 3 data-parallel ranks of 3 nodes idle for 11% of "
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.event == "warning"
    assert event.fields["text"] == f"{text}the time"
    assert capsys.readouterr().err == f"recipes_training: {text}the time\n"


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
        (["resilience.tiered=null"], f"resilience.tiered null {NO_STORE}"),
        (["resilience/tiered=ram"], f"resilience.tiered.store null {NO_STORE}"),
        (["resilience/tiered=aws"], f"resilience.tiered.backend 'aws' {NO_STORE}"),
        (["resilience/tiered=ram_s3"],
         (f"resilience.tiered.ram.replicas 1 does not fit {ON_HYPERPOD}, where no node's memory "
          "reaches another's; allowed: 0")),
        (["trainer.sharding=full"],
         (f"trainer.sharding 'full' does not fit {ON_HYPERPOD}: its one copy of the state lies "
          "on all nodes; allowed: 'none', or 'hybrid'")),
        ([RESTARTS],
         ("cluster.run_policy.restart_policy.scale_up_snooze_s 9 is set by "
          "resilience.elastic.scale_up_snooze_s 60 with resilience.elastic; allowed: null")),
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

    assert not found.keys() & {"memoryd.sh", "memoryd.peers"}
    assert "peer" not in found["start.sh"]
