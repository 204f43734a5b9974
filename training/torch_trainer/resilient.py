"""A run of one worker that goes on through faults: the same steps, under many generations.

Model, optimizer and data stay in memory; the block here runs again under each
generation and makes only what belongs to it. Imported where the job has
resilience.checkpointless, and nowhere else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import transformers
from torch.utils.hooks import RemovableHandle

from launcher.job import Job
from launcher.job.workload import TorchTrainer
from resilience.checkpointless.plan import Fallback
from resilience.checkpointless.recovery import Recovery, Resumed
from resilience.comm.page import Activity
from resilience.errors import StateError
from resilience.events import EventLog
from resilience.faults.hooks import reach_in_backward
from resilience.faults.injector import Injector
from resilience.inprocess.block import BlockOptions, Hooks, reexecutable
from resilience.inprocess.generation import Generation
from resilience.state.digest import digest_state
from resilience.state.layout import Seat
from resilience.state.rng import seed_step
from resilience.state.torch_state import TorchState, materialise, refuse_unshared
from training.data.loading import (
    announce_samples,
    check_begun_with,
    check_same_samples,
    open_samples,
)
from training.data.tokens import Samples, check_num_samples
from training.environment import WorkerEnvironment
from training.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    PlacementError,
    WeightsError,
)
from training.group import WorkerGroup, open_device
from training.plan import check_world_size, plan_device_type, plan_schedule
from training.stop import EXIT_STATUS, StopSignal
from training.torch_trainer.batches import Batches, open_batches
from training.torch_trainer.checkpoint import write_checkpoint
from training.torch_trainer.checkpoint_backend import open_checkpoints
from training.torch_trainer.checkpoints import SAVE_DUE, STALL_S
from training.torch_trainer.epoch_checkpoint import EpochCheckpoint, ends_epoch
from training.torch_trainer.faults import flip_bit, make_injector
from training.torch_trainer.inherited import open_shared, open_transfer_buffer, read_own_handles
from training.torch_trainer.model import (
    SpreadModel,
    build_core,
    fill_core,
    give_memory,
    spread_core,
)
from training.torch_trainer.rebind import clear_step, take_groups
from training.torch_trainer.run import StepLog, describe_step, make_stepper
from training.torch_trainer.step import Stepper, StepResult
from training.torch_trainer.watch import RunWatch

_FATAL = (
    PlacementError,
    DataError,
    WeightsError,
    CheckpointError,
    DivergedError,
    StateError,
)
"""Errors that would come again in the next generation."""
_OTHER_SHARD_STATUS = 72
"""Exit status of a worker that was given a rank with another shard; a fresh one takes it."""


def run_resilient(
    job: Job, *, run_dir: Path, node: str, events: EventLog, stop: StopSignal
) -> None:
    """Train the job's model from its first step to its last, through faults."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job.trainer.threads_per_worker)
    run = _ResilientRun(job, run_dir=run_dir, node=node, events=events, stop=stop)
    reexecutable(
        run.block,
        report=run.recovery.report,
        enter=run.enter,
        hooks=Hooks(on_fault=run.on_fault),
        options=BlockOptions(device_type=plan_device_type(job), fatal=_FATAL),
    )()
    run.end()


class _ResilientRun:
    """What a worker keeps over generations."""

    def __init__(
        self, job: Job, *, run_dir: Path, node: str, events: EventLog, stop: StopSignal
    ) -> None:
        assert isinstance(job.trainer, TorchTrainer)
        assert job.resilience.checkpointless is not None
        self._job = job
        self._trainer = job.trainer
        self._run_dir = run_dir
        self._node = node
        self._events = events
        self._stop = stop
        self._handles = read_own_handles()
        self._schedule = plan_schedule(job)
        self._samples: Samples | None = None
        self._batches: Batches | None = None
        self._complete: int | None = None
        """Step of the newest checkpoint that is known to be complete."""
        self._begun: int | None = None
        """Step of the one that has begun since, if any has."""
        self._model: SpreadModel | None = None
        self._stepper: Stepper | None = None
        self._injector: Injector | None = None
        self._state: TorchState | None = None
        self._hooks: tuple[RemovableHandle, ...] | None = None
        self._rank: int | None = None
        self._seat: Seat | None = None
        self._is_started = False
        self._saves = open_checkpoints(job, run_dir=run_dir, node=node, events=events)
        self.watch = RunWatch(self)
        self.recovery = Recovery(
            apply=self._apply,
            transfer_buffer=open_transfer_buffer(self._handles),
            shared=open_shared(self._handles),
            self_check_every_n_steps=job.resilience.checkpointless.self_check_every_n_steps,
            reach=self._reach,
            before_update=lambda: self._saves.before_update(self.watch.pulse),
            keep=self._saves.keep,
        )
        # What needs no rank is done here, before a spare gets one.
        self._core = build_core(job, self._trainer)
        refuse_unshared(self._core)
        device_type = plan_device_type(job)
        if self._trainer.sharding == "none" and device_type == "cpu":
            give_memory(self._core, job.model, torch.device(device_type))

    # ---- one generation

    def enter(self, generation: Generation) -> None:
        """Note a generation before anything is done in it."""
        seat = generation.layout.seat(generation.rank)
        if self._seat is not None and self._seat.shard != seat.shard:
            # Its memory, and what was made of it, are those of another shard.
            os._exit(_OTHER_SHARD_STATUS)
        if self._rank not in (None, generation.rank):
            self._leave_rank()
        self._rank, self._seat = generation.rank, seat
        self._events.rank, self._events.generation = generation.rank, generation.number
        self.recovery.enter(generation.number, generation.layout)
        if generation.number > 0:
            # The others are within their steps, and this rank has to end with them.
            self._stop.defer()
        if not self._is_started:
            self._is_started = True
            self._events.write("worker_started", pid=os.getpid(), world_size=generation.world_size)

    def _leave_rank(self) -> None:
        """Keep nothing that was made for the rank's number: the next one is another.

        The run went on without this process, so what it knew of checkpoints is old, too.
        """
        self._injector = self._state = None
        self._complete = self._begun = None
        for hook in self._hooks or ():
            hook.remove()
        self._hooks = None
        if self._batches is not None:
            self._batches.leave()
            self._batches = None

    def on_fault(self, error: BaseException) -> None:
        """Note that the training thread has stopped."""
        phase = self.recovery.mark.phase.value
        self._events.write("rank_stopped", step=self.recovery.mark.step, phase=phase)
        self._saves.abandon()
        # What was begun may have been left: until the next one is complete the one before counts.
        self._begun = None
        self.watch.leave()

    def block(self, generation: Generation) -> None:
        """Run in one generation until the last step, from whatever step it begins with."""
        self._events.write("process_group_ready")
        group = self._make_group(generation)
        injector = self._make_injector(generation)
        self.watch.enter(generation, injector)
        self._open_data(group)
        if self._model is not None:
            # What is to be done now is short, and a rank that is stuck in it holds up all others.
            generation.mark(Activity.RECOVERY, self.recovery.mark.step)
        model = self._make_model(group)
        self._bind_rank(model, injector)
        checkpoint = self._open_checkpoint()
        view = self.recovery.view_with_rest()
        assert self._state is not None
        self._saves.bind(view, self.recovery, group, state=self._state, stall_s=self._stall_s())
        resumed = self.recovery.resume(
            generation, lambda fallback: self._start(fallback, generation, group, checkpoint)
        )
        self.recovery.begin()
        clear_step(model)
        self._note_resumed(resumed)
        self._check_samples()
        self._take_steps(generation, group, checkpoint)
        self.recovery.check()
        generation.mark(Activity.NOWHERE, self._trainer.max_steps)
        assert self._state is not None
        self._events.write(
            "state_digest", step=self.recovery.mark.step, digest=digest_state(self._state)
        )
        if self._trainer.save_checkpoint:
            assert self._model is not None
            write_checkpoint(self._model.core, self._run_dir, group=group, events=self._events)

    def end(self) -> None:
        """Remove what only a run that goes on needs; all ranks have finished."""
        self._saves.close()
        if self._batches:
            self._batches.close()
        if self._rank == 0:
            self._open_checkpoint().remove()

    def _stall_s(self) -> float:
        """Return for how long a copy may stand still, well before that counts as a hang."""
        assert self._job.resilience.checkpointless is not None
        return min(STALL_S, self._job.resilience.checkpointless.hang_deadline_s / 2)

    def _make_group(self, generation: Generation) -> WorkerGroup:
        host, _, port = generation.store_address.rpartition(":")
        environment = WorkerEnvironment(
            rank=generation.rank,
            local_rank=generation.local_rank,
            world_size=generation.world_size,
            master_addr=host,
            master_port=int(port),
            generation=generation.number,
            is_store_hosted=True,
        )
        check_world_size(self._job, generation.world_size)
        device = open_device(plan_device_type(self._job), generation.local_rank)
        return WorkerGroup(
            environment=environment,
            node=self._node,
            device=device,
            store=generation.store,
            check=generation.check,
        )

    def _make_injector(self, generation: Generation) -> Injector:
        """Make what fires this rank's faults, once a rank: hooks of the model refer to it."""
        if self._injector is None:
            self._injector = make_injector(
                self._job,
                generation.layout,
                generation.rank,
                run_dir=self._run_dir,
                events=self._events,
                on_corrupt=self._flip_bit,
                agent_pid=self._handles.agent_pid,
            )
        return self._injector

    def _open_data(self, group: WorkerGroup) -> None:
        """Open the samples; who has them already tells the others that they are there."""
        if self._samples is not None:
            announce_samples(self._job.data, self._samples, group)
            return
        samples = open_samples(self._job.data, self._job.model, run_dir=self._run_dir, group=group)
        check_num_samples(samples, self._trainer.global_batch_size)
        check_same_samples(samples, group)
        self._events.write("data_ready", num_samples=samples.num_samples)
        self._samples = samples

    def _open_batches(self, group: WorkerGroup) -> Batches:
        """Open the batches of this rank, which goes on reading where another generation ended."""
        assert self._samples is not None
        if self._batches is None:
            self._batches = open_batches(
                self._job,
                self._samples,
                group,
                first=self.recovery.mark.step,
                run_dir=self._run_dir,
                owner_pid=self._handles.agent_pid,
                events=self._events,
                on_wait=self.watch.pulse,
            )
        if self._complete is not None:
            self._batches.note_checkpoint(self._complete)
        return self._batches

    def _check_samples(self) -> None:
        """Refuse data that has changed since the run began; the state knows which that was."""
        assert self._samples is not None
        check_begun_with(self.recovery.rest, self._samples, self._node)

    def _make_model(self, group: WorkerGroup) -> SpreadModel:
        if self._model is not None:
            take_groups(self._model)
            return self._model
        self._model = spread_core(
            self._core, self._trainer, self._job.model, group, is_restartable=True
        )
        self._stepper = make_stepper(
            self._job,
            self._model,
            group,
            self._stop,
            watch=self.watch,
            wants_save=self._saves.wants_save,
        )
        materialise(self._stepper.optimizer)
        self._events.write("model_ready", num_parameters=self._model.num_parameters)
        return self._model

    def _bind_rank(self, model: SpreadModel, injector: Injector) -> None:
        """Make what stands between the model and the rank that the process has, once a rank."""
        assert self._stepper is not None
        assert self._seat is not None
        if self._state is None:
            self._state = TorchState(
                model.core,
                self._stepper.optimizer,
                replica=self._seat.replica,
                shard=self._seat.shard,
            )
            self.recovery.bind(self._state)
        if self._hooks is None:
            self._hooks = reach_in_backward(
                model.layers,
                injector,
                step=lambda: self.watch.step,
                is_reducing=lambda: self.watch.is_last_micro_batch,
            )

    def _open_checkpoint(self) -> EpochCheckpoint:
        assert self._state is not None
        return EpochCheckpoint(self._run_dir, self._state, key=self._job.digest())

    def _start(
        self,
        fallback: Fallback,
        generation: Generation,
        group: WorkerGroup,
        checkpoint: EpochCheckpoint,
    ) -> int:
        """Load the newest state that was written, or make the one before the first step."""
        assert self._model is not None
        assert self._stepper is not None
        generation.mark(Activity.NOWHERE, 0)
        step, source = 0, "start"
        newest = checkpoint.newest_step(group)
        if begun := self._saves.load_newest(group, newer_than=newest):
            step, source = begun.step, begun.source
        elif found := checkpoint.read(group):
            step, self.recovery.rest = found
            source = "checkpoint"
        else:
            self.recovery.rest = {}
            fill_core(self._job, self._model.core)
            for moments in self._stepper.optimizer.state.values():
                for tensor in moments.values():
                    tensor.zero_()
        self._complete, self._begun = step, None
        self._saves.begin_run(group, step)
        if generation.number > 0 or source != "start":
            self._events.write(
                "recovery_fallback", step=step, reason=fallback.reason, source=source
            )
        return step

    def _note_resumed(self, resumed: Resumed) -> None:
        self._events.write(
            "rank_recovered",
            step=resumed.step,
            role=resumed.role,
            reason=resumed.reason,
            source=resumed.source,
            num_bytes=resumed.num_bytes,
        )

    def _reach(self, place: str, step: int) -> None:
        self.watch.injector.reach(place, step)

    # ---- steps

    def _take_steps(
        self, generation: Generation, group: WorkerGroup, checkpoint: EpochCheckpoint
    ) -> None:
        assert self._stepper is not None
        assert self._samples is not None
        batches = self._open_batches(group)
        log = StepLog(self._job, self._events if generation.rank == 0 else None)
        first, num_samples = self.recovery.mark.step, self._samples.num_samples
        batch_size = self._trainer.global_batch_size
        log.go_on(self.recovery.rest.get("last"))
        self._stop.defer()
        for step in range(first, self._trainer.max_steps):
            if ends_epoch(step, global_batch_size=batch_size, num_samples=num_samples):
                self._write_state(step, generation, group, checkpoint)
            self.watch.begin(step, Activity.DATA)
            if self._saves.begin_step(
                step,
                generation=self.recovery.mark.step_generation,
                is_requested=self.recovery.rest.get(SAVE_DUE, False),
                pulse=self.watch.pulse,
            ):
                self._note_begun(step)
            self.watch.injector.reach("data", step)
            rows = batches.read(step)
            seed_step(self._trainer.seed, step, generation.rank)
            self.recovery.begin()
            lr = self._schedule.lr_at(step)
            result = self._stepper.run(rows, step=step, lr=lr)
            self._stop.last_step = step
            log.report(step, result, lr)
            if step == first and generation.number > 0:
                self._events.write("rank_resumed", step=step)
            if result.is_stop_requested:
                self._finish(group, is_forced=True)
                raise SystemExit(EXIT_STATUS)
        self._finish(group, is_forced=False)
        self._stop.release()

    def _finish(self, group: WorkerGroup, *, is_forced: bool) -> None:
        """Let the last checkpoint end, under no deadline but its own."""
        mark = self.recovery.mark
        self.watch.begin(mark.step, Activity.NOWHERE)
        self._saves.finish(
            mark.step,
            generation=mark.step_generation,
            is_forced=is_forced,
            group=group,
            pulse=self.watch.pulse,
            check=self.recovery.check,
        )

    def _write_state(
        self, step: int, generation: Generation, group: WorkerGroup, checkpoint: EpochCheckpoint
    ) -> None:
        """Write the state at the end of an epoch, under no deadline but the store's.

        Where it cannot be written the run goes on: it has its state in memory, and
        only its last resort is older than it could be.
        """
        generation.mark(Activity.NOWHERE, step)
        try:
            is_written = checkpoint.write(step, self.recovery.rest, group, self.recovery.check)
        except CheckpointError as error:
            if generation.rank == 0:
                text = (
                    f"{error}; the run goes on, and should it lose every copy of its state it goes "
                    "back to an older one; make room for two states, or mend the disk"
                )
                sys.stderr.write(f"training: {text}\n")
                self._events.write("warning", step=step, text=text)
            return
        if is_written:
            self._note_complete(step)
        if is_written and generation.rank == 0:
            self._events.write("state_written", step=step)

    def _note_begun(self, step: int) -> None:
        """Note that a checkpoint begins: the one before it is complete."""
        if self._begun is not None and self._begun > (self._complete or 0):
            self._note_complete(self._begun)
        self._begun = step

    def _note_complete(self, step: int) -> None:
        """Let batches go that no resume needs: it begins at the newest complete checkpoint."""
        self._complete = step
        if self._batches is not None:
            self._batches.note_checkpoint(step)

    def _apply(self, step: int) -> None:
        assert self._stepper is not None
        self._stepper.update(self._schedule.lr_at(step))

    def note_result(self, step: int, result: StepResult) -> None:
        """Let what the step came to go with the state: who replaces this rank may tell it."""
        self.recovery.pending = describe_step(step, result, self._schedule.lr_at(step))

    def _flip_bit(self, kind: str) -> None:
        assert self._stepper is not None
        flip_bit(self._stepper.optimizer, kind)
