"""Runs the loop under a node agent, again and again in one process, through faults.

Imported where the job has resilience.checkpointless, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from launcher.job import TrainingJob
from recipes_training.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    OwnedError,
    PlacementError,
    WeightsError,
)
from recipes_training.loop import Loop, Worker
from recipes_training.plan import plan_device_type
from recipes_training.progress import CommitHooks
from recipes_training.trainer import MakeTrainer, StepWatch, Trainer
from resilience.checkpointless.recovery import Recovery
from resilience.comm.messages import SaveState, StateSaved
from resilience.errors import StateError
from resilience.inprocess.block import BlockOptions, GaveUp, reexecutable
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import WorkerHandles, read_handles
from resilience.state.report import Report
from resilience.state.shared import SharedState
from resilience.state.transfer_buffer import TransferBuffer

_FATAL = (
    PlacementError,
    DataError,
    WeightsError,
    CheckpointError,
    OwnedError,
    DivergedError,
    StateError,
)
"""Errors that would come again in the next generation."""


def run_with_recovery(worker: Worker, make_trainer: MakeTrainer) -> None:
    """Train the job's model from its first step to its last, through faults."""
    handles = read_handles(os.environ)
    assert handles is not None, "main looks whether an agent has started this worker"
    settings = worker.job.resilience.checkpointless
    assert settings is not None

    shared = SharedState(handles.state_files)
    # What is there now: the memory of ranks that train.
    shared.prepare()

    def make_recovery(hooks: CommitHooks) -> Recovery:
        return Recovery(
            apply=hooks.apply,
            transfer_buffer=_open_transfer_buffer(handles),
            shared=shared,
            self_check_every_n_steps=settings.self_check_every_n_steps,
            reach=hooks.reach,
            before_update=hooks.before_update,
            keep=hooks.keep,
        )

    loop = Loop(worker, reserve_room(make_trainer, shared), make_recovery)
    recovery = loop.progress
    assert isinstance(recovery, Recovery)

    def enter(generation: Generation) -> None:
        is_first = worker.events.rank is None
        loop.enter(generation)
        recovery.enter(generation)
        if is_first:
            worker.events.write(
                "worker_started", pid=os.getpid(), world_size=generation.layout.world_size
            )

    def leave(error: BaseException) -> None:
        worker.events.write(
            "rank_stopped", step=recovery.mark.step, phase=recovery.mark.phase.value
        )
        loop.leave()

    def run(generation: Generation) -> None:
        if (reason := loop.run(generation)) is not None:
            raise GaveUp(reason)

    def report(*, rank: int, node: str, generation: int) -> Report:
        own = recovery.report(rank=rank, node=node, generation=generation)
        return replace(own, rest=loop.describe_saved())

    reexecutable(
        run,
        report=report,
        enter=enter,
        save=partial(_save_alone, loop, recovery),
        on_fault=leave,
        # The block writes the model, too.
        options=BlockOptions(device_type=plan_device_type(worker.job), fatal=_FATAL, is_all=True),
    )()
    loop.end()


def _save_alone(
    loop: Loop, recovery: Recovery, order: SaveState, check: Callable[[], None]
) -> StateSaved:
    mark = recovery.mark
    if (mark.step, mark.step_generation) != (order.step, order.step_generation):
        raise CheckpointError(f"this rank holds step {mark.step} by now, not {order.step}")
    return loop.save_alone(order, check)


def reserve_room(make_trainer: MakeTrainer, shared: SharedState) -> MakeTrainer:
    """Have the memory for a trainer's state made with the trainer, before it has a rank."""

    def make(job: TrainingJob, watch: StepWatch, *, is_restartable: bool) -> Trainer:
        trainer = make_trainer(job, watch, is_restartable=is_restartable)
        if trainer.early_view is not None:
            shared.reserve(trainer.early_view)
        return trainer

    return make


def _open_transfer_buffer(handles: WorkerHandles) -> TransferBuffer:
    transfer_buffer = TransferBuffer(
        handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes
    )
    transfer_buffer.touch()
    return transfer_buffer
