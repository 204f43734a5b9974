"""Brings the faults of a job's recipe to the places of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim import Optimizer

from launcher.job import Job
from resilience.events import EventLog
from resilience.faults.injector import Injector
from resilience.faults.schedule import faults_from
from resilience.state.layout import Layout


def make_injector(
    job: Job,
    layout: Layout,
    rank: int,
    *,
    run_dir: Path,
    events: EventLog,
    on_corrupt: Callable[[str], None],
    agent_pid: int | None,
) -> Injector:
    """Return what fires a rank's faults; without any it does nothing."""
    settings = job.resilience.faults
    faults = faults_from(
        settings.model_dump() if settings else {},
        num_steps=job.trainer.max_steps,
        layout=layout,
    )
    return Injector(
        faults,
        rank=rank,
        layout=layout,
        run_dir=run_dir,
        on_corrupt=on_corrupt,
        events=events,
        agent_pid=agent_pid,
    )


def flip_bit(optimizer: Optimizer, kind: str) -> None:
    """Change the state as a broken memory would; `kind` is parameter or moment."""
    parameter = optimizer.param_groups[0]["params"][0]
    tensor = parameter if kind == "parameter" else optimizer.state[parameter]["exp_avg"]
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    with torch.no_grad():
        local.view(torch.int32).view(-1)[0] ^= 1 << 20
