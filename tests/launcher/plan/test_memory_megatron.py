"""The bytes of a rank under Megatron-Core are those of its own objects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.job.workload import MegatronTrainer
from launcher.plan.activations import _megatron_pass
from launcher.plan.memory import megatron_state, replica
from tests.launcher.plan.worlds import job_of

LLAMA = "llama/llama3_tiny_megatron_checkpointless"
GPT_OSS = "gpt_oss/gpt_oss_tiny_megatron_checkpointless"
PLAIN = ("resilience.faults=null", "resilience.checkpointless=null", "trainer.micro_batch_size=2",
         "data.seq_length=128")  # fmt: skip
BF16 = ("trainer.precision=bf16", "instance=ml.p5.48xlarge")
TENSOR = ("trainer.tensor_parallel=2", "trainer.sequence_parallel=true",
          "trainer.num_devices=2", "trainer.num_replicas=1")  # fmt: skip
STAGES = ("trainer.tensor_parallel=2", "trainer.pipeline_parallel=2", "trainer.num_devices=8",
          "trainer.num_replicas=2", "model.num_layers=4")  # fmt: skip
EXPERTS = ("trainer.expert_parallel=2", "trainer.num_devices=4", "trainer.num_replicas=2")
RANKS = {
    "tensor": (True, LLAMA, *PLAIN, *TENSOR),
    "tensor-bf16": (True, LLAMA, *PLAIN, *BF16, *TENSOR),
    "experts-bf16": (True, GPT_OSS, *PLAIN, *BF16, "trainer.expert_parallel=1",
                     "trainer.num_replicas=1", "trainer.num_devices=1"),
    "experts-tensor-bf16": (True, GPT_OSS, *PLAIN, *BF16, *TENSOR, "trainer.expert_parallel=1"),
    "stages-replicas": (False, LLAMA, *PLAIN, *BF16, *STAGES),
    "experts-divided-replicas": (False, GPT_OSS, *PLAIN, *BF16, *EXPERTS),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> dict[str, dict[str, int]]:
    """What each rank has, all measured in one process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.launcher.plan.megatron_rank"],
        input="".join(json.dumps(each) + "\n" for each in RANKS.values()),
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(RANKS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", RANKS)
def test_weights_gradients_and_state_are_megatrons(
    name: str, ranks: dict[str, dict[str, int]]
) -> None:
    """The optimizer's parts are padded: they differ by a thousandth."""
    _, *words = RANKS[name]
    job, rank = job_of(*words), ranks[name]
    assert isinstance(job.trainer, MegatronTrainer)

    weights, gradients, optimizer = megatron_state(job.model, job.trainer, stage=0)

    assert (weights.value, gradients.value) == (rank["weights"], rank["gradients"])
    copied = optimizer.value * (1 if job.trainer.precision == "bf16" else 1.5)
    assert copied == pytest.approx(rank["state"], rel=1e-3)
    has_replica = job.trainer.num_replicas > 1
    assert replica(job).value == pytest.approx(rank["state"] * has_replica, rel=1e-3)


@pytest.mark.parametrize("name", [name for name, (is_run, *_) in RANKS.items() if is_run])
def test_what_layers_keep_is_what_megatron_saves(
    name: str, ranks: dict[str, dict[str, int]]
) -> None:
    _, *words = RANKS[name]
    job = job_of(*words)
    assert isinstance(job.trainer, MegatronTrainer)

    one = _megatron_pass(job.model, job.trainer, job.data.seq_length)

    # Of the loss probabilities alone are kept, a third of what its backward pass takes.
    tokens = job.trainer.micro_batch_size * job.data.seq_length
    kept = job.model.num_layers * one.layer
    kept += tokens * 4 * job.model.vocab_size // job.trainer.tensor_parallel
    assert kept == pytest.approx(ranks[name]["kept"], rel=0.15)
