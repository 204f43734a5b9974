"""The job that systems with Megatron-Core train: tensor ranks in pairs, each pair with a copy.

The tiny recipe with the model and the batches of the other systems' job. Its job.json is written
by the driver; workers read it from the run folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.jobplan import MICRO_BATCH, NUM_RANKS, JobPlan

if TYPE_CHECKING:
    from launcher.job import Job

RECIPE = "llama/llama3_tiny_megatron_checkpointless"
SEQUENCE = 64
NAME = "job.json"
OVERRIDES = (
    "trainer.num_nodes=1",
    f"trainer.num_devices={NUM_RANKS}",
    "trainer.tensor_parallel=2",
    f"trainer.micro_batch_size={MICRO_BATCH}",
    f"trainer.global_batch_size={MICRO_BATCH * NUM_RANKS // 2}",
    "trainer.optimizer.warmup_steps=1",
    f"data.seq_length={SEQUENCE}",
    "data.max_bytes=400000",
    "model.num_layers=5",
    "model.hidden_size=160",
    "model.ffn_hidden_size=448",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=40",
    "resilience.faults=null",
    "resilience.tiered=null",
    "resilience.checkpointless.process_restarts_max=1000",
    "resilience.checkpointless.restarts_without_progress_max=1000",
)


def write_job(plan: JobPlan, *overrides: str) -> Job:
    """Write the run's job.json; a system's own overrides come last."""
    from launcher.composition.compose import resolve

    job = resolve(RECIPE, [*OVERRIDES, f"trainer.max_steps={plan.num_steps}", *overrides])
    Path(plan.run_dir, NAME).write_text(job.to_json(), "utf-8")
    return job


def read_job(plan: JobPlan) -> Job:
    """Read what the driver has written."""
    from launcher.job import read_job

    return read_job(Path(plan.run_dir, NAME))


def join_digests(own: str) -> str:
    """Return one digest of all ranks' states; every rank calls it."""
    import torch.distributed as dist

    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return "-".join(told)
