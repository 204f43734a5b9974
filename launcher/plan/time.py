"""How long a job will train. Pure."""

from __future__ import annotations

from launcher.job.content import TrainingContent
from launcher.job.fields import time_limit_seconds
from launcher.job.parameters import count_active_parameters, count_parameters
from launcher.plan.devices import Device
from launcher.plan.figure import Figure

DAY_S = 86400


def work(job: TrainingContent) -> tuple[Figure, ...]:
    """Return the steps and tokens of the whole run."""
    trainer, length = job.trainer, job.data.seq_length
    batch = trainer.global_batch_size
    tokens = trainer.max_steps * batch * length
    return (
        Figure(name="steps", value=trainer.max_steps, unit="number",
               formula=f"trainer.max_steps {trainer.max_steps}", source="the recipe"),
        Figure(name="tokens", value=tokens, unit="number",
               formula=f"{trainer.max_steps:,} steps x {batch} samples x {length} tokens",
               source="the recipe"),
    )  # fmt: skip


def duration(job: TrainingContent, device: Device, mfu: float) -> tuple[Figure, ...]:
    """Return the time of the whole run without faults, as devices' hours and as days."""
    seconds = training_seconds(job, device, mfu)
    world, active = job.trainer.world_size, count_active_parameters(job.model)
    which = "parameters" if active == count_parameters(job.model) else "active parameters"
    return (
        Figure(name="device-hours", value=seconds / 3600 * world, unit="hours",
               formula=f"days x 24 x {world} devices", source="no faults, stops or queues"),
        Figure(name="days", value=seconds / DAY_S, unit="days",
               formula=f"6 x {active:,} {which} x tokens / ({world} x "
               f"{device.bf16_flop_s:.4g} FLOP/s x {mfu:g})",
               source="arXiv 2001.08361, 2.1"),
    )  # fmt: skip


def training_seconds(job: TrainingContent, device: Device, mfu: float) -> float:
    """Return how long the job computes at a share of its devices' peak."""
    trainer = job.trainer
    tokens = trainer.max_steps * trainer.global_batch_size * job.data.seq_length
    operations = 6 * count_active_parameters(job.model) * tokens
    return operations / (trainer.world_size * device.bf16_flop_s * mfu)


def limit_days(job: TrainingContent) -> float | None:
    """Return the days after which the run is ended, None where nothing ends it."""
    return time_limit_seconds(job.time_limit) / DAY_S if job.time_limit else None


def replica_seconds(job: TrainingContent, device: Device, num_bytes: float) -> float:
    """Return how long a lost rank's state is on its way from another rank, at least.

    Where a node holds several copies the state comes from the same node. Else all ranks of a lost
    node are sent theirs at once.
    """
    trainer = job.trainer
    is_near = (trainer.num_shards or 1) < trainer.num_devices
    near, far = device.link_gb_s * 1e9 / 2, device.network_gbit_s * 1e9 / 8 / trainer.num_devices
    return num_bytes / (near if is_near else far)
