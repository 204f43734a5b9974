"""Brings the faults of a job's recipe to the places of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launcher.job import Job
from resilience.events import EventLog
from resilience.faults.injector import Injector
from resilience.faults.schedule import faults_from
from training.group import WorkerGroup


def make_injector(
    job: Job,
    group: WorkerGroup,
    *,
    run_dir: Path,
    events: EventLog,
    on_corrupt: Callable[[str], None],
    agent_pid: int | None,
) -> Injector:
    """Return what fires this worker's faults; without any it does nothing."""
    trainer, settings = job.trainer, job.resilience.faults
    faults = faults_from(
        settings.model_dump() if settings else {},
        num_steps=trainer.max_steps,
        world_size=trainer.world_size,
        num_nodes=trainer.num_nodes,
    )
    environment = group.environment
    return Injector(
        faults,
        rank=environment.rank,
        run_dir=run_dir,
        on_corrupt=on_corrupt,
        events=events,
        node=environment.rank // trainer.num_devices,
        local_rank=environment.local_rank,
        agent_pid=agent_pid,
    )
