"""Rank 0 of a world, as plain PyTorch builds and trains it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer

from launcher.job import Job
from launcher.job.workload import TorchTrainer
from recipes_training.group import WorkerGroup
from recipes_training.plan import aux_loss_coef, plan_mesh
from recipes_training.torch.model import (
    SpreadModel,
    _open_mesh,
    _shard,
    build_core,
    fill_core,
    give_memory,
    spread_core,
)
from recipes_training.torch.step import TorchStepper
from recipes_training.torch.trainer import _make_optimizer
from resilience.state.torch_state import materialise
from tests.launcher.plan.worlds import CPU


def shard_on_meta(job: Job) -> tuple[nn.Module, Optimizer]:
    """Return the model and the optimizer of a rank as they are before they have memory."""
    trainer = job.trainer
    assert isinstance(trainer, TorchTrainer)
    core = build_core(job, trainer)
    if mesh := plan_mesh(trainer, trainer.world_size):
        _shard(core, _open_mesh(mesh, "cpu", is_restartable=False), trainer)
    optimizer = _make_optimizer(job, core)
    materialise(optimizer)
    return core, optimizer


def train_once(job: Job, group: WorkerGroup, *, is_tracked: bool) -> tuple[nn.Module, int]:
    """Take the gradients of one micro batch, twice where they are tracked.

    Returns the model, and what torch's tracker saw at the most beside weights, gradients, which
    stay from the first time, and the optimizer.
    """
    trainer = job.trainer
    assert isinstance(trainer, TorchTrainer)
    core = build_core(job, trainer)
    if is_tracked and trainer.sharding == "none":
        # Buckets of the reducer become the gradients, which stay from the first time.
        give_memory(core, job.model, CPU)
        reducer: Any = SimpleNamespace(micro_batch=lambda **_: nullcontext())
        model = SpreadModel(run=core.train(), core=core, num_shards=None, reducer=reducer)
    else:
        model = spread_core(core, trainer, job.model, group)
    fill_core(job, core)
    optimizer = _make_optimizer(job, core)
    materialise(optimizer)
    stepper = TorchStepper(
        model,
        optimizer,
        num_terms=1,
        clip_norm=None,
        aux_loss_coef=aux_loss_coef(job.model),
        is_autocast=trainer.precision == "bf16" and trainer.sharding == "none",
        device=CPU,
        watch=cast("Any", SimpleNamespace(forward=lambda *_, **__: None, backward=lambda _: None)),
    )
    shape = (trainer.micro_batch_size, job.data.seq_length + 1)
    rows = torch.randint(0, job.model.vocab_size, shape)
    stepper._accumulate([rows])
    if not is_tracked:
        return core, 0
    tracker = MemTracker()
    tracker.track_external(core, optimizer)
    with tracker:
        stepper._accumulate([rows])
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    kinds = {getattr(kind, "name", kind): size for kind, size in peak.items()}
    return core, kinds["ACT"] + kinds["TEMP"] + kinds["OTH"]
