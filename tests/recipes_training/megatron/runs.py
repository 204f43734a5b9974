"""Small runs of Megatron in every layout of its ranks."""

from __future__ import annotations

from typing import Any

from launcher.job import Job
from recipes_training.plan import plan_copy
from tests.recipes_training import jobs
from tests.scenarios.recovery.runs import FaultOutcome, make_fault_job

NUM_STEPS = 16
# Tensor ranks divide the vocabulary, stages the layers.
LLAMA = {**jobs.LLAMA, "vocab_size": 260, "num_layers": 4}
GPT_OSS = {**jobs.GPT_OSS, "vocab_size": 260}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "tensor": {"tensor_parallel": 2},
    "sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel": 2},
    "experts": {"expert_parallel": 2},
    "experts-tensor": {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "experts-sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "tensor-pipeline": {"tensor_parallel": 2, "pipeline_parallel": 2, "num_devices": 8},
    "long-pipeline": {"pipeline_parallel": 4, "num_devices": 8},
}
_PARTS = ("max_steps", "num_nodes", "num_devices", "faults", "settings", "mmap", "recovers")
"""What of a job is no key of its trainer."""


def make_megatron_job(layout: str, **values: Any) -> Job:
    """Return a job of 4 ranks, or of as many as its layout needs."""
    own = {**LAYOUTS[layout], **values}
    parts = {key: own.pop(key) for key in _PARTS if key in own}
    return make_fault_job(
        "megatron",
        **{"max_steps": NUM_STEPS, "num_devices": 4, **parts},
        values={"overlap_grad_reduce": False, "overlap_param_gather": False, **own},
        model=GPT_OSS if "experts" in layout else LLAMA,
    )


def list_shards(layout: str) -> list[str]:
    """Return which shard each rank holds a copy of."""
    job = make_megatron_job(layout)
    size = job.trainer.world_size
    ranks = plan_copy(job, size).layout(["node-0"], size)
    return [ranks.seat(rank).shard for rank in range(size)]


def check_nobody_had_to_be_stopped(outcome: FaultOutcome) -> None:
    """Assert that no wait of a rank has outlived its generation."""
    log = "".join(path.read_text("utf-8") for path in outcome.folder.glob("agent-*.log"))
    assert "did not stop within" not in log
    assert not [e for e in outcome.named("fault_detected") if e.fields["reason"] == "hung"]
