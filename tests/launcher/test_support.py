"""What is said before a job is started that would be of no use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from launcher.clusters.k8s.check import read_documents
from launcher.errors import RecipeError
from launcher.job import Job
from launcher.support import (
    check_runnable,
    is_installed,
    lost_results,
    notes,
    printed_notes,
    unmounted_inputs,
)
from tests.launcher.command import launch, put
from tests.launcher.shipped import CLUSTERS, RECIPES, rendered, shipped_job

TINY, LARGE = "llama/llama3_tiny_pretrain", "llama/llama3_8b_pretrain"
FAULTY = "llama/llama3_tiny_checkpointless"
CLAIM = "cluster.volume_claims=[{claim_name: fsx, mount_path: /fsx}]"


@pytest.mark.parametrize("overrides", [
    [],
    [CLAIM],
    [CLAIM, "cluster.run_path=/fsx2/runs"],
    ["cluster.volume_claims=[{claim_name: a, mount_path: /fsx, read_only: true}]",
     "cluster.run_path=/fsx"],
])  # fmt: skip
def test_results_without_a_volume_are_told_and_not_submitted(overrides: list[str]) -> None:
    job = shipped_job(TINY, "job", overrides)

    assert "be lost with the pods" in (lost_results(job) or "")
    with pytest.raises(RecipeError, match="be lost with the pods"):
        check_runnable(job, "submit")


def test_inputs_that_no_volume_holds_are_named() -> None:
    without = unmounted_inputs(shipped_job(LARGE, "job", [CLAIM]))
    mounted = "cluster.volume_claims=[{claim_name: fsx, mount_path: /data, read_only: true}]"

    assert without is not None
    assert "data.path '/data/pretrain/train.jsonl'" in without
    token = ["resilience.tiered.token_file=/etc/own/token"]
    assert "resilience.tiered.token_file '/etc/own/token'" in (
        unmounted_inputs(shipped_job("llama/llama3_tiny_tiered", "job", token)) or ""
    )
    assert unmounted_inputs(shipped_job(LARGE, "job", [mounted])) is None
    assert unmounted_inputs(shipped_job(LARGE, "slurm")) is None


@pytest.mark.parametrize(("override", "missing"), [
    ("trainer.context_parallel=2", r"trainer.context_parallel 2 \(it runs: 1\)"),
    ("trainer.virtual_pipeline=2", r"trainer.virtual_pipeline 2 \(it runs: null\)"),
])  # fmt: skip
def test_what_has_no_runtime_here_is_refused(override: str, missing: str) -> None:
    with pytest.raises(RecipeError, match=missing):
        check_runnable(shipped_job("llama/llama3_70b_pretrain", "slurm", [override]), "submit")


def test_a_partition_s_limit_is_noted_where_it_ends_the_run_for_good() -> None:
    """A run that goes on after its limit needs no note."""
    for overrides, kind, is_noted in (
        (["resilience.tiered=null"], "slurm", True),
        (["resilience.tiered=null", "time_limit=1-00:00:00"], "slurm", False),
        (["resilience.tiered=null"], "local", False),
        ([], "slurm", False),
    ):
        told = notes(shipped_job(TINY, kind, overrides))
        assert any("DefaultTime" in note for note in told) == is_noted, overrides


HOST_PATH = "cluster.host_paths=[{path: /nvme, mount_path: /fsx/scratch}]"
SHARED, OF_EACH_NODE = "cluster.run_path=/fsx/runs", "cluster.run_path=/fsx/scratch/runs"
READ_ONLY = "cluster.host_paths=[{path: /nvme, mount_path: /fsx/scratch, read_only: true}]"
INNER_CLAIM = (
    "cluster.volume_claims=[{claim_name: a, mount_path: /fsx}, "
    "{claim_name: b, mount_path: /fsx/scratch, read_only: true}]"
)
ONE_NODE = ["trainer.num_nodes=1", "trainer.global_batch_size=8"]


@pytest.mark.parametrize(("recipe", "kind", "overrides", "problem"), [
    pytest.param(TINY, "job", [HOST_PATH, OF_EACH_NODE], "each of the 2 nodes", id="plain"),
    pytest.param(TINY, "hyperpod", [HOST_PATH, OF_EACH_NODE], "each of the 2 nodes", id="hyperpod"),
    pytest.param(FAULTY, "job", [HOST_PATH, OF_EACH_NODE], "each of the 2 nodes", id="recovers"),
    pytest.param("llama/llama3_tiny_elastic", "job", [HOST_PATH, OF_EACH_NODE],
                 "each of the 4 nodes", id="elastic"),
    pytest.param(TINY, "job", [HOST_PATH, OF_EACH_NODE, *ONE_NODE], None, id="one-node"),
    pytest.param(TINY, "job", [HOST_PATH, SHARED], None, id="beside-it"),
    pytest.param(TINY, "job", [READ_ONLY, OF_EACH_NODE, *ONE_NODE], "is on no volume",
                 id="not-writable-within-a-claim-that-is"),
])  # fmt: skip
def test_run_path_on_each_nodes_own_disk_is_noted_and_refused(
    recipe: str, kind: str, overrides: list[str], problem: str | None
) -> None:
    job = shipped_job(recipe, kind, [CLAIM, *overrides])

    said = [note for note in notes(job) if note.startswith("cluster.run_path")]

    assert len(said) == (problem is not None)
    if problem is not None:
        assert problem in said[0]
        with pytest.raises(RecipeError, match=re.escape(said[0])):
            check_runnable(job, "submit")


@pytest.mark.parametrize("overrides", [
    pytest.param([HOST_PATH], id="host-path-within-a-claim"),
    pytest.param([INNER_CLAIM], id="read-only"),
])  # fmt: skip
def test_store_on_an_inner_volume_that_not_all_pods_write_to_is_refused(
    overrides: list[str],
) -> None:
    store = "resilience.tiered.store.url=folder:/fsx/scratch/store"
    job = shipped_job(TINY, "job", [CLAIM, *overrides, SHARED, store])

    with pytest.raises(RecipeError, match="is on no claim that all pods write to"):
        check_runnable(job, "submit")


SPREAD = ["trainer.num_nodes=2", "trainer.global_batch_size=64", "trainer.tensor_parallel=4"]
STAGES, MORE_NODES = "trainer.pipeline_parallel=2", "trainer.num_nodes=4"


@pytest.mark.parametrize(("overrides", "cost"), [
    pytest.param([STAGES, "resilience.tiered=null"], "costs all steps", id="two-stages-two-nodes"),
    pytest.param([STAGES], "costs the steps since the last checkpoint", id="with-tiers"),
    pytest.param([STAGES, MORE_NODES], None, id="a-stage-has-two-nodes"),
    pytest.param(["trainer.pipeline_parallel=1"], None, id="one-stage"),
    pytest.param([STAGES, "trainer.num_nodes=1", "trainer.tensor_parallel=2",
                  "resilience.tiered=null"], None, id="one-node-is-one-fate"),
])  # fmt: skip
def test_copies_of_a_shard_on_one_node_are_noted(overrides: list[str], cost: str | None) -> None:
    recipe = "llama/llama3_70b_pretrain_tiered"
    job = shipped_job(recipe, "slurm", [*SPREAD, "model=llama3_8b", *overrides])

    said = [note for note in notes(job) if note.startswith("trainer.num_replicas 2 puts")]

    assert len(said) == (cost is not None)
    assert cost is None or cost in said[0]
    assert cost is None or "trainer.num_nodes of at least 4, or" in said[0]
    assert cost is None or "trainer.pipeline_parallel of at most 1" in said[0]


ELASTIC_VALUES = ["resilience/elastic=default"]
RECOVERS = ["resilience/checkpointless=default", "resources.shm_gib=1"]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_elastic_sizes_need_recovery(cluster: str) -> None:
    """But where HyperPod's operator changes the size, which cannot recover."""
    where = [*(PREPARED if job_has_image(cluster) else ()), *ELASTIC_VALUES]
    alone, recovers = shipped_job(TINY, cluster, where), [*where, *RECOVERS]
    if cluster == "hyperpod":
        check_runnable(alone, "submit")
        check_runnable(shipped_job(TINY, cluster, recovers), "submit")
    else:
        check_runnable(shipped_job(TINY, cluster, recovers), "submit")
        with pytest.raises(RecipeError, match=r"\.elastic without resilience\.checkpointless"):
            check_runnable(alone, "submit")


# What fits every shipped recipe: an image of the team's, and a claim for inputs and results.
PREPARED = (
    "cluster.image=registry.example/team/training:1",
    "cluster.volume_claims=[{claim_name: fsx, mount_path: /data}]",
    "cluster.run_path=/data/runs",
)


def _said(job: Job) -> list[str]:
    """Return what the rendered files say has to change: their head's list, one text an entry."""
    found = []
    for name, text in rendered(job).items():
        if name.endswith(".json"):
            continue
        lines = text.splitlines()
        heads = [index for index, line in enumerate(lines) if line.startswith("# Know before you ")]
        noted: list[str] = []
        for line in lines[heads[0] + 1 :] if heads else ():
            if line.startswith("# - "):
                noted.append(line[4:])
            elif line.startswith("#   "):
                noted[-1] += f" {line[4:].strip()}"
            else:
                break
        found.append(noted)
    assert all(each == found[0] for each in found), "the nodes' scripts differ"
    return found[0]


def _is_refused(job: Job) -> bool:
    try:
        check_runnable(job, "submit", has_default_image=job.cluster.kind == "k8s")
    except RecipeError:
        return True
    return False


def job_has_image(cluster: str) -> bool:
    return cluster in {"hyperpod", "job", "trainjob"}


FOLDER = (
    "trainer.folder null does not say where trainer.entry {!r} lies on the nodes; allowed: the "
    "absolute path of its folder there, or of the entry"
)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_shipped_recipe_says_all_that_keeps_it_from_running(recipe: str, cluster: str) -> None:
    """Written out here, so that a rule which is forgotten is missed."""
    job = shipped_job(recipe, cluster, PREPARED if job_has_image(cluster) else ())
    expected = []
    if cluster != "local" and job.training is None:
        # Its entry is a file of a checkout.
        expected.append(FOLDER.format(job.trainer.entry))

    told = _said(job)
    assert told == [" ".join(note.split()) for note in notes(job)]
    said = [note for note in told if not note.startswith("the pods wait for the Secret")]
    # As of one that no rule queues again: a test above names these.
    said = [note for note in said if not note.startswith("time_limit null")]
    assert said == expected
    assert _is_refused(job) == bool(expected)


@pytest.mark.parametrize("kind", ["hyperpod", "job"])
def test_a_manifest_says_at_its_job_what_its_head_says(kind: str) -> None:
    job = shipped_job("llama/llama3_70b_pretrain_tiered", kind)
    documents = read_documents(rendered(job)["manifest.yaml"])
    found = [
        document["metadata"]["annotations"].get("training-recipes/notes") for document in documents
    ]

    assert found[:-1] == [None] * (len(documents) - 1)
    assert found[-1] == "\n".join(notes(job))
    assert len(notes(job)) == 4


def test_a_command_in_a_note_can_be_copied_from_the_file() -> None:
    text = rendered(shipped_job("llama/llama3_tiny_tiered", "job", PREPARED))["manifest.yaml"]

    assert (
        "\n#     openssl rand -hex 32 | kubectl -n default create secret generic "
        "llama3-tiny-tiered-token --from-file=token=/dev/stdin\n"
    ) in text


def test_a_job_that_lacks_nothing_has_one_note_for_whoever_applies_it_by_hand() -> None:
    job = shipped_job(FAULTY, "job", PREPARED)

    assert printed_notes(job, "submit", has_default_image=False) == []
    (note,) = printed_notes(job, "render", has_default_image=False)
    assert [note] == notes(job)
    assert note.startswith("the pods wait for the Secret 'llama3-tiny-checkpointless-token'")


def test_a_warm_up_that_is_longer_than_the_run_is_noted() -> None:
    job = shipped_job(TINY, "local", ["trainer.max_steps=20"])

    (note,) = printed_notes(job, "render", has_default_image=False)

    assert note == (
        "trainer.optimizer.warmup_steps 20 is not less than trainer.max_steps 20, so the learning "
        "rate never reaches trainer.optimizer.lr 0.003"
    )


def test_a_note_cannot_become_a_line_of_the_manifest() -> None:
    """Whatever characters a path has."""
    job = shipped_job(TINY, "job", ["cluster.run_path='/a b: {c}  # d'"])
    text = rendered(job)["manifest.yaml"]

    assert list(yaml.safe_load_all(text)) == read_documents(text)
    assert "'/a b: {c}  # d' is on no volume" in " ".join(_said(job))


IMAGE_REFUSAL = "action 'submit': cluster.image 'training-recipes:0.1.0' is published nowhere"


def test_the_default_image_is_noted_and_not_submitted(tmp_path: Path) -> None:
    recipe = [f"recipe={TINY}", "cluster=k8s", "cluster.job_kind=job", *PREPARED[1:]]

    shown = launch(*recipe, folder=tmp_path)
    refused = launch(*recipe, "action=submit", "run.dir=out", folder=tmp_path)

    assert shown.status == 0
    assert "note: cluster.image 'training-recipes:0.1.0' is published nowhere" in shown.err
    assert refused.status == 2
    assert refused.err.startswith(IMAGE_REFUSAL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["command-line", "profile"])
def test_the_default_image_may_be_given_by_its_name(tmp_path: Path, given: str) -> None:
    """A cluster may have it under this very name. There is no kubectl here, which is status 1."""
    image = "training-recipes:0.1.0"
    if given == "profile":
        (tmp_path / "conf" / "cluster").mkdir(parents=True)
        (tmp_path / "conf" / "cluster" / "ours.yaml").write_text(
            f"defaults: [k8s, _self_]\nimage: {image}\n"
        )
        arguments = ["cluster=ours"]
    else:
        arguments = ["cluster=k8s", f"cluster.image={image}"]

    ended = launch(f"recipe={TINY}", *arguments, *PREPARED[1:], "action=submit", folder=tmp_path,
                   env={"PATH": str(tmp_path)})  # fmt: skip

    assert (ended.status, ended.err.split(" on ")[0]) == (1, "no program 'kubectl'")
    content = json.loads((tmp_path / "runs" / "llama3-tiny-pretrain" / "job.json").read_text())
    assert content["cluster"]["image"] == image


def test_a_profile_that_does_not_name_an_image_has_the_default_one(tmp_path: Path) -> None:
    put(tmp_path / "conf" / "cluster" / "ours.yaml", "defaults: [k8s, _self_]\n")

    ended = launch(f"recipe={TINY}", "cluster=ours", *PREPARED[1:], "action=submit",
                   folder=tmp_path)  # fmt: skip

    assert ended.status == 2
    assert ended.err.startswith(IMAGE_REFUSAL)


@pytest.mark.parametrize(
    ("module", "is_there"),
    [("xml.etree", True), ("xml.nothing", False), ("nothing.core", False)],
)
def test_a_module_is_installed_where_all_of_its_name_is(module: str, is_there: bool) -> None:
    assert is_installed(module) is is_there
