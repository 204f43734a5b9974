"""A whole run of one worker: group, data, model, steps, checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim import AdamW, Optimizer

from launcher.job import Job
from launcher.job.workload import TorchTrainer
from resilience.events import EventLog
from training.data.loading import check_begun_with, check_same_samples, open_samples
from training.data.tokens import Samples, check_num_samples
from training.environment import WorkerEnvironment
from training.group import DATA_TIMEOUT, WorkerGroup, open_group
from training.plan import (
    aux_loss_coef,
    check_world_size,
    has_weight_decay,
    is_logged,
    plan_adamw,
    plan_device_type,
    plan_schedule,
)
from training.stop import EXIT_STATUS, StopSignal
from training.torch_trainer.batches import Batches, open_batches
from training.torch_trainer.checkpoint import write_checkpoint
from training.torch_trainer.checkpoint_backend import open_checkpoints
from training.torch_trainer.checkpoints import (
    SAVE_DUE,
    STALL_S,
    Checkpoints,
)
from training.torch_trainer.model import SpreadModel, build_model
from training.torch_trainer.step import Stepper, StepResult, StepWatch


def run_training(
    job: Job,
    environment: WorkerEnvironment,
    *,
    run_dir: Path,
    node: str,
    events: EventLog,
    stop: StopSignal,
) -> None:
    """Train the job's model from its first step to its last."""
    trainer = job.trainer
    assert isinstance(trainer, TorchTrainer)
    check_world_size(job, environment.world_size)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(trainer.threads_per_worker)
    saves = open_checkpoints(job, run_dir=run_dir, node=node, events=events)
    with open_group(environment, node=node, device_type=plan_device_type(job)) as group:
        if group.device.type == "cuda":
            _choose_fixed_order()
        events.write("process_group_ready")
        with group.meet("data", DATA_TIMEOUT):
            samples = open_samples(job.data, job.model, run_dir=run_dir, group=group)
            check_num_samples(samples, trainer.global_batch_size)
            check_same_samples(samples, group)
        events.write("data_ready", num_samples=samples.num_samples)
        model = build_model(job, trainer, group)
        events.write("model_ready", num_parameters=model.num_parameters)
        run = _PlainRun(job, model, samples, group, events, stop, saves)
        first = run.begin()
        batches = open_batches(
            job,
            samples,
            group,
            first=first,
            run_dir=run_dir,
            owner_pid=os.getppid(),
            events=events,
        )
        run.take_steps(first, batches)
        batches.close()
        if trainer.save_checkpoint:
            write_checkpoint(model.core, run_dir, group=group, events=events)
    saves.close()


class _PlainRun(StepWatch):
    """The steps of a run without recovery, which may begin from a checkpoint."""

    def __init__(
        self,
        job: Job,
        model: SpreadModel,
        samples: Samples,
        group: WorkerGroup,
        events: EventLog,
        stop: StopSignal,
        saves: Checkpoints,
    ) -> None:
        self.rest: dict[str, Any] = {}
        self._job = job
        self._model = model
        self._samples = samples
        self._group = group
        self._stop = stop
        self._saves = saves
        self._generation = -1
        """Which start of the workers made the last update; -1 where none of this run did."""
        self._stepper = make_stepper(
            job, model, group, stop, watch=self, wants_save=saves.wants_save
        )
        self._log = StepLog(job, events if group.environment.rank == 0 else None)

    def begin(self) -> int:
        """Return the first step to be taken, with its state in memory."""
        job, group = self._job, self._group
        if job.resilience.tiered is None:
            return 0
        from training.torch_trainer.plain_state import open_state

        view = open_state(job, self._model.core, self._stepper.optimizer, group, progress=self)
        self._saves.bind(view, self, group, state=view.state, stall_s=STALL_S)
        begun = self._saves.load_newest(group, newer_than=None)
        if begun is None:
            view.make_first()
            self.rest = {}
        check_begun_with(self.rest, self._samples, group.node)
        first = begun.step if begun else 0
        self._saves.begin_run(group, first)
        return first

    def take_steps(self, first: int, batches: Batches) -> None:
        """Take all steps from this one on."""
        schedule = plan_schedule(self._job)
        self._log.go_on(self.rest.get("last"))
        self._stop.defer()
        newest = first
        batches.note_checkpoint(first)
        for step in range(first, self._job.trainer.max_steps):
            lr = schedule.lr_at(step)
            if self._saves.begin_step(
                step,
                generation=self._generation,
                is_requested=self.rest.get(SAVE_DUE, False),
                pulse=_go_on,
            ):
                # Until this one is complete, the one before it is the newest.
                batches.note_checkpoint(newest)
                newest = step
            result = self._stepper.run(batches.read(step), step=step, lr=lr)
            self._generation = self._group.environment.generation
            self.rest = {**self.rest, **describe_step(step, result, lr)}
            self._stop.last_step = step
            self._log.report(step, result, lr)
            if result.is_stop_requested:
                self._finish(step + 1, is_forced=True)
                raise SystemExit(EXIT_STATUS)
        self._finish(self._job.trainer.max_steps, is_forced=False)
        self._stop.release()

    @contextmanager
    def commit(self, result: StepResult) -> Iterator[None]:
        """Let the update begin: all workers have ended the one before, or this had no sum."""
        self._saves.before_update(_go_on)
        self._saves.keep()
        yield

    def _finish(self, step: int, *, is_forced: bool) -> None:
        self._saves.finish(
            step,
            generation=self._generation,
            is_forced=is_forced,
            group=self._group,
            pulse=_go_on,
            check=_go_on,
        )


def describe_step(step: int, result: StepResult, lr: float) -> dict[str, Any]:
    """Return what goes with the state that a step has made."""
    last = {"step": step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr}
    return {"last": last, SAVE_DUE: result.is_save_requested}


def _go_on() -> None:
    """Show nobody that the worker gets on, and check nothing: no agent is watching."""


class StepLog:
    """Writes step events; a worker without a log writes none."""

    def __init__(self, job: Job, events: EventLog | None) -> None:
        self._trainer = job.trainer
        self._events = events
        self._last_step = -1
        self._last_time_s = time.perf_counter()

    def report(self, step: int, result: StepResult, lr: float) -> None:
        """Write the step if it is one of those to be logged."""
        if self._events is None or not self._is_logged(step):
            return
        now_s = time.perf_counter()
        duration_s = (now_s - self._last_time_s) / (step - self._last_step)
        self._write(self._events, step, result.loss, lr, result.grad_norm, duration_s)
        self._last_step, self._last_time_s = step, now_s

    def go_on(self, last: Mapping[str, Any] | None) -> None:
        """Go on after a recovery: write the last committed step, whose writer may be gone.

        `last` has its step, loss, lr and grad_norm; None where there was none.
        """
        self._last_time_s = time.perf_counter()
        if last is None:
            return
        self._last_step = step = last["step"]
        if self._events is not None and self._is_logged(step):
            self._write(self._events, step, last["loss"], last["lr"], last["grad_norm"], None)

    def _is_logged(self, step: int) -> bool:
        return is_logged(
            step,
            log_every_n_steps=self._trainer.log_every_n_steps,
            max_steps=self._trainer.max_steps,
        )

    def _write(
        self,
        events: EventLog,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float,
        duration_s: float | None,
    ) -> None:
        events.write(
            "step",
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            duration_s=duration_s,
            num_samples=(step + 1) * self._trainer.global_batch_size,
        )


def make_stepper(
    job: Job,
    model: SpreadModel,
    group: WorkerGroup,
    stop: StopSignal,
    watch: StepWatch | None = None,
    wants_save: Callable[[], bool] = lambda: False,
) -> Stepper:
    """Return what takes the job's steps, with a fresh optimizer."""
    is_sharded = model.num_sharded_copies is not None
    return Stepper(
        model=model,
        optimizer=_make_optimizer(job, model.core),
        clip_norm=job.trainer.optimizer.clip_norm,
        aux_loss_coef=aux_loss_coef(job.model),
        is_autocast=job.trainer.precision == "bf16" and not is_sharded,
        device=group.device,
        world_size=group.environment.world_size,
        is_stop_requested=lambda: stop.is_requested,
        is_save_requested=wants_save,
        watch=watch or StepWatch(),
    )


def _make_optimizer(job: Job, core: nn.Module) -> Optimizer:
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in core.named_parameters():
        (decayed if has_weight_decay(name, parameter.ndim) else kept).append(parameter)
    options = job.trainer.optimizer
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return AdamW(groups, **plan_adamw(options))


def _choose_fixed_order() -> None:
    """Take the kernels whose sums have one order, where there are such."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Nothing here reads memory before it is written, and to fill it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
