"""What is said before a job is started that would be of no use."""

from __future__ import annotations

import pytest

from launcher.errors import RecipeError
from launcher.support import check_runnable, lost_results, unmounted_inputs
from tests.launcher.shipped import shipped_job

TINY, LARGE = "llama/llama3_tiny_pretrain", "llama/llama3_8b_pretrain"
FAULTY = ("llama/llama3_tiny_checkpointless", "gpt_oss/gpt_oss_tiny_checkpointless")
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


def test_results_below_a_claim_are_kept() -> None:
    job = shipped_job(TINY, "job", [CLAIM, "cluster.run_path=/fsx/runs"])

    assert lost_results(job) is None
    check_runnable(job, "submit")


def test_inputs_that_no_volume_holds_are_named() -> None:
    without = unmounted_inputs(shipped_job(LARGE, "job", [CLAIM]))
    mounted = "cluster.volume_claims=[{claim_name: fsx, mount_path: /data, read_only: true}]"

    assert without is not None
    assert "data.path '/data/pretrain/train.jsonl'" in without
    assert unmounted_inputs(shipped_job(LARGE, "job", [mounted])) is None
    assert unmounted_inputs(shipped_job(LARGE, "slurm")) is None


@pytest.mark.parametrize(("recipe", "missing"), [
    ("llama/llama3_70b_pretrain", "trainer.kind 'megatron'"),
    ("llama/llama3_70b_pretrain_checkpointless", "trainer.kind 'megatron'"),
])  # fmt: skip
def test_what_has_no_runtime_here_is_refused(recipe: str, missing: str) -> None:
    with pytest.raises(RecipeError, match=missing):
        check_runnable(shipped_job(recipe, "slurm"), "submit")


@pytest.mark.parametrize("recipe", FAULTY)
def test_recovery_without_checkpoints_runs_and_is_submitted(recipe: str) -> None:
    check_runnable(shipped_job(recipe, "local"), "run")
    check_runnable(shipped_job(recipe, "slurm"), "submit")
    check_runnable(shipped_job(recipe, "job", [CLAIM, "cluster.run_path=/fsx"]), "submit")


def test_recovery_that_hyperpods_agent_would_not_do_is_refused() -> None:
    job = shipped_job(FAULTY[0], "hyperpod", [CLAIM, "cluster.run_path=/fsx"])

    with pytest.raises(RecipeError, match=r"resilience\.checkpointless with cluster\.job_kind"):
        check_runnable(job, "submit")


def test_elastic_sizes_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"cannot run, resilience\.elastic;"):
        check_runnable(shipped_job(TINY, "slurm", ["resilience/elastic=default"]), "submit")
