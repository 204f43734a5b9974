"""The group and the newest checkpoint of workers that torchrun starts again after a fault."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from benchmarks.jobplan import JobPlan
from benchmarks.recovery_peers import job


def open_group(plan: JobPlan) -> None:
    """Open the group under a prefix of this attempt.

    Without it ranks meet the gloo addresses of the attempt before, since torch 2.13 keeps one
    store for all of them and a restart then often never comes up.
    """
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(address, port, is_master=False))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=plan.num_ranks,
        timeout=timedelta(seconds=plan.gloo_timeout_s),
    )


class NewestCheckpoint:
    """The folder of checkpoints, by the steps to go on with; the two newest stay."""

    def __init__(self, plan: JobPlan) -> None:
        self._every = plan.checkpoint_every
        self.folder = Path(plan.run_dir, "checkpoints")
        self.folder.mkdir(exist_ok=True)
        self._newest = self.folder / "newest"

    def read_step(self) -> int:
        """Return the step of the newest one, and 0 where there is none."""
        return int(self._newest.read_text("utf-8")) if self._newest.exists() else 0

    def name_step(self, next_step: int) -> None:
        """Name a checkpoint the newest once it is whole; rank 0 does."""
        if int(os.environ["RANK"]) == 0:
            fresh = self.folder / "newest.new"
            fresh.write_text(str(next_step), "utf-8")
            fresh.replace(self._newest)
            shutil.rmtree(self.folder / str(next_step - 2 * self._every), ignore_errors=True)

    def save(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, next_step: int
    ) -> None:
        """Write one of torch's, where the plan has one at this step."""
        if next_step % self._every == 0:
            state = dict(job.named_state(model, optimizer))
            checkpoint.save(state, checkpoint_id=self.folder / str(next_step))
            self.name_step(next_step)

    def restore(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest of torch's in place and return the step to go on with."""
        if next_step := self.read_step():
            job.fill_optimizer(model, optimizer)
            state = dict(job.named_state(model, optimizer))
            checkpoint.load(state, checkpoint_id=self.folder / str(next_step))
        return next_step
