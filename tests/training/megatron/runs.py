"""Runs of Megatron on a few ranks, in whatever layout."""

from __future__ import annotations

from typing import Any

from launcher.job import Job
from tests.training.jobs import GPT_OSS, LLAMA
from tests.training.recovery.runs import make_fault_job

NUM_STEPS = 16
# Tensor ranks divide the vocabulary, stages the layers.
MODEL = {**LLAMA, "vocab_size": 260, "num_layers": 4}
EXPERTS = {**GPT_OSS, "vocab_size": 260}
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


def make_megatron_job(layout: str, **values: Any) -> Job:
    """Return a job of 4 ranks, or of as many as its layout needs."""
    own = {**LAYOUTS[layout], **values}
    faults, recovers = own.pop("faults", ()), own.pop("recovers", True)
    return make_fault_job(
        "megatron",
        max_steps=NUM_STEPS,
        faults=faults,
        recovers=recovers,
        num_devices=own.pop("num_devices", 4),
        values={"overlap_grad_reduce": False, "overlap_param_gather": False, **own},
        model=EXPERTS if "experts" in layout else MODEL,
    )
