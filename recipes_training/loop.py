"""The one life of a worker: data, state, steps, saves, stop, log, faults, end.

A framework stands behind `recipes_training.trainer`, the generations behind a coordinator, and
recovery is a value: `Loop` is given how a step is committed and how the state comes back
after a fault, or that neither is there. Each step is taken in one order: compute, gate,
update, settle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launcher.job import TrainingJob
from recipes_training.backends.choice import open_checkpoints
from recipes_training.checkpoints import STALL_S, Subject
from recipes_training.coordinator import Members
from recipes_training.data.loading import (
    announce_samples,
    check_same_samples,
    open_samples,
    place_in_data,
)
from recipes_training.data.position import Position
from recipes_training.data.tokens import Samples, check_num_samples
from recipes_training.data.worker_batches import Batches, open_batches
from recipes_training.errors import CheckpointError
from recipes_training.group import CHECKPOINT_TIMEOUT, DATA_TIMEOUT, WorkerGroup, open_device
from recipes_training.plan import (
    LOG_RANK,
    check_layout,
    plan_device_type,
    plan_placement,
    plan_split,
)
from recipes_training.progress import CommitHooks, MakeProgress, NoRecovery
from recipes_training.steplog import StepLog, tell_idle
from recipes_training.steps.steps import LEAVE, SAVE, SAVE_DUE, Steps
from recipes_training.steps.watch import RunWatch
from recipes_training.stop import EXIT_STATUS, StopSignal
from recipes_training.trainer import MakeTrainer
from resilience.comm.messages import OTHER_SHARD_STATUS, SaveState, StateSaved
from resilience.comm.page import Activity
from resilience.errors import PlannedError
from resilience.events import EventLog
from resilience.faults.injector import Injector
from resilience.faults.schedule import plan_faults
from resilience.node_config import UNSTORED_STATUS
from resilience.state.digest import digest_state
from resilience.state.layout import Seat
from resilience.state.view import ViewWithRest

if TYPE_CHECKING:  # a run without the feature imports nothing of it
    from resilience.checkpointless.plan import Fallback
    from resilience.checkpointless.recovery import Resumed

_START = "start"
"""Source of the state before the first step."""
MODEL_FOLDER = "checkpoint"
"""Folder of the run in which the trained model ends up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a worker is started with."""

    job: TrainingJob
    run_dir: Path
    node: str
    """Name of the node in events."""
    owner_pid: int
    """The process that outlives the worker: what is made ahead for it ends with that one."""
    events: EventLog
    stop: StopSignal


class Loop:
    """What a worker keeps over generations.

    `make_recovery` makes what commits steps and brings the state back; without it the
    run has no recovery, and its one generation ends with its first fault.
    """

    def __init__(
        self,
        worker: Worker,
        make_trainer: MakeTrainer,
        make_recovery: MakeProgress | None = None,
    ) -> None:
        torch.set_num_threads(worker.job.trainer.threads_per_worker)
        self._worker = worker
        self._job, self._events, self._stop = worker.job, worker.events, worker.stop
        self._is_recoverable = make_recovery is not None
        self._samples: Samples | None = None
        self._batches: Batches | None = None
        self._position: Position | None = None
        self._injector: Injector | None = None
        self._complete: int | None = None
        """Step of the newest checkpoint that is known to be complete."""
        self._place = ""
        """Where that lies; empty for the state before the first step."""
        self._place_in_world: tuple[int, int] | None = None
        """Rank and world size."""
        self._members: Members | None = None
        self._seat: Seat | None = None
        self._is_built = False
        self._told_size = 0
        self._blocked_s = 0.0
        """How long the step that is taken has stood still for checkpoints."""
        self.watch = RunWatch(self._requests, seed=worker.job.trainer.seed)
        self._saves = open_checkpoints(
            worker.job, run_dir=worker.run_dir, node=worker.node, events=worker.events
        )
        self.progress = (make_recovery or NoRecovery)(
            CommitHooks(
                apply=self._apply,
                reach=self.watch.reach_at,
                before_update=self._before_update,
                keep=self._saves.keep,
            )
        )
        # What needs no rank is done here, before a spare gets one.
        self._trainer = make_trainer(worker.job, self.watch, is_restartable=self._is_recoverable)
        self._steps = Steps(
            worker.job,
            trainer=self._trainer,
            progress=self.progress,
            watch=self.watch,
            events=worker.events,
        )

    # ---- one generation

    def enter(self, members: Members) -> None:
        """Note a generation before anything is done in it."""
        seat = members.layout.seat(members.rank)
        if self._seat is not None and self._seat.shard != seat.shard:
            # Its memory, and what was made of it, are those of another shard.
            os._exit(OTHER_SHARD_STATUS)
        place = (members.rank, members.layout.world_size)
        if self._place_in_world not in (None, place):
            self._leave_rank()
        self._place_in_world, self._seat = place, seat
        self._members = members
        self._events.enter(members.number, rank=members.rank)
        if self._is_recoverable and members.number > 0:
            # The others are within their steps, and this rank has to end with them.
            self._stop.defer()

    def _leave_rank(self) -> None:
        """Drop what belongs to the rank that this process had, and not to its shard.

        The run went on without this process, so what it knew of checkpoints is old, too.
        """
        self._injector = self._complete = None
        if self._batches is not None:
            self._batches.leave()
            self._batches = None

    def leave(self) -> None:
        """Keep nothing of a generation that is over; the training thread has stopped."""
        self._saves.abandon()
        self._members = None
        self.watch.leave()

    def run(self, members: Members) -> str | None:
        """Run in one generation until the last step, from whatever step it begins with.

        In one that is for saving the state alone, returns where that lies.
        """
        self._events.write("process_group_ready")
        group = self._make_group(members)
        self._tell_idle(members)
        placement = plan_placement(self._job.trainer, group.layout, group.rank)
        own = plan_split(self._job, placement.data_size).micro_batches(placement.data_rank)
        self.watch.enter(members, self._make_injector(group), first_micro_batch=own.start)
        samples = self._open_data(group)
        self._take_groups(group)
        self._bind_checkpoints(group)
        resumed = self.progress.resume(members, lambda fallback: self._start(fallback, members))
        self.progress.begin()
        self._trainer.discard()
        # What is settled is the update that the state comes from.
        self.watch.go_to(self.progress.step - 1)
        self._trainer.settle()
        if resumed is not None:
            self._note_resumed(resumed)
            if members.is_last:
                return self._save_last(group, has_state=resumed.role != "started")
            if members.is_passing:
                raise PlannedError("all ranks have one state, and leave for another size")
        position = self._place_in_data(self.progress.step)
        if not self._is_recoverable:
            self._note_model()
        self._take_steps(members, group, self._open_batches(samples, position, group))
        self.progress.check()
        members.mark(Activity.NOWHERE, self._job.trainer.max_steps)
        self._end_run(group)
        if self._saves.is_unstored:
            raise SystemExit(UNSTORED_STATUS)
        return None

    def _tell_idle(self, members: Members) -> None:
        """Say once for each size of a run that may change it how long its ranks wait."""
        num_nodes, is_size = len(members.layout.nodes), not (members.is_passing or members.is_last)
        if self._job.resilience.elastic and is_size and num_nodes != self._told_size:
            self._told_size = num_nodes
            if members.rank == LOG_RANK:
                tell_idle(self._job, num_nodes, self._events)

    def describe_saved(self) -> dict[str, Any]:
        """Return what a report says of the newest state that is known to be complete.

        Where it lies is said once a node: reports go to everybody.
        """
        step = -1 if self._complete is None else self._complete
        is_teller = step >= 0 and self._seat is not None and self._seat.local_rank == 0
        return {"saved": step, **({"place": self._place} if is_teller else {})}

    def end(self) -> None:
        """Remove what only a run that goes on needs; all ranks have finished."""
        self._saves.close()
        if self._batches:
            self._batches.close()

    def _end_run(self, group: WorkerGroup) -> None:
        if self._is_recoverable:
            self._events.write(
                "state_digest", step=self.progress.step, digest=digest_state(self._trainer.view)
            )
        if not self._job.trainer.save_checkpoint:
            return
        folder = self._worker.run_dir / MODEL_FOLDER
        if group.rank == 0:
            self._events.write("checkpoint_started")
        self._trainer.export(folder)
        if group.rank == 0:
            num_bytes = sum(each.stat().st_size for each in folder.iterdir())
            self._events.write("checkpoint_written", path=str(folder), num_bytes=num_bytes)

    def _bind_checkpoints(self, group: WorkerGroup) -> None:
        subject = Subject(
            state=self._trainer.view,
            view=ViewWithRest(self._trainer.view, self.progress),
            progress=self.progress,
            group=group,
            placement=plan_placement(self._job.trainer, group.layout, group.rank),
            stall_s=self._stall_s(),
            pulse=self.watch.pulse,
        )
        self._saves.bind(subject)

    def _stall_s(self) -> float:
        """Return for how long a copy may stand still, well before that counts as a hang."""
        settings = self._job.resilience.checkpointless
        return STALL_S if settings is None else min(STALL_S, settings.hang_deadline_s / 2)

    def _make_group(self, members: Members) -> WorkerGroup:
        check_layout(self._job, members.layout, is_passing=members.is_passing)
        local_rank = members.layout.seat(members.rank).local_rank
        return WorkerGroup(
            rank=members.rank,
            layout=members.layout,
            generation=members.number,
            node=self._worker.node,
            device=open_device(plan_device_type(self._job), local_rank),
            store=members.store,
            # Not the generation's own: what keeps the group would keep its process groups, too.
            check=self.watch.check,
        )

    def _make_injector(self, group: WorkerGroup) -> Injector | None:
        """Return what fires this rank's faults; None in a run that would not survive them."""
        if self._injector is None and self._is_recoverable:
            faults = plan_faults(
                self._job.resilience.faults,
                num_steps=self._job.trainer.max_steps,
                world_size=group.world_size,
            )
            self._injector = Injector(
                faults,
                rank=group.rank,
                layout=group.layout,
                run_dir=self._worker.run_dir,
                on_corrupt=self._corrupt,
                events=self._events,
                agent_pid=self._worker.owner_pid,
            )
        return self._injector

    def _open_data(self, group: WorkerGroup) -> Samples:
        """Open the samples; a worker that has them already tells the others that they are there."""
        job = self._job
        if self._samples is not None:
            announce_samples(job.data, self._samples, group)
            return self._samples
        # With recovery a process may be alone in this, and its fault ends the generation for all.
        with nullcontext() if self._is_recoverable else group.meet("data", DATA_TIMEOUT):
            samples = open_samples(job.data, job.model, run_dir=self._worker.run_dir, group=group)
            check_num_samples(samples, job.trainer.global_batch_size)
            check_same_samples(samples, group)
        self._events.write("data_ready", num_samples=samples.num_samples)
        self._samples = samples
        return samples

    def _open_batches(self, samples: Samples, position: Position, group: WorkerGroup) -> Batches:
        """Open this rank's batches, which go on where another generation ended."""
        if self._batches is not None and self._position != position:
            # The run went back to a state of before its batch or its data were changed.
            self._batches.leave()
            self._batches = None
        if self._batches is None:
            self._position = position
            self._batches = open_batches(
                self._job,
                samples,
                plan_placement(self._job.trainer, group.layout, group.rank),
                first=self.progress.step,
                position=position,
                run_dir=self._worker.run_dir,
                owner_pid=self._worker.owner_pid,
                events=self._events,
                on_wait=self.watch.pulse,
                waits_at_first=self._members is None or self._members.number == 0,
            )
        if self._complete is not None:
            self._batches.note_checkpoint(self._complete)
        return self._batches

    def _take_groups(self, group: WorkerGroup) -> None:
        if self._is_built:
            # What is to be done now is short, and a rank that is stuck in it holds up all others.
            self.watch.begin(self.progress.step, Activity.RECOVERY)
        self._trainer.take_groups(group)
        self.progress.bind(self._trainer.view)
        if not self._is_built and self._is_recoverable:
            self._note_model()
        self._is_built = True

    def _note_model(self) -> None:
        self._events.write("model_ready", num_parameters=self._trainer.num_parameters)

    def _place_in_data(self, step: int) -> Position:
        """Return which samples the steps take; refuses data that have changed unasked."""
        assert self._samples is not None
        return place_in_data(
            self.progress.rest, self._samples, job=self._job, step=step, node=self._worker.node
        )

    def _start(self, fallback: Fallback | None, members: Members) -> int:
        """Load the newest state that was written, or make the one before the first step."""
        members.mark(Activity.NOWHERE, 0)
        step, source = 0, _START
        if begun := self._saves.load_newest():
            step, source = begun.step, begun.source
        else:
            self.progress.take_rest({})
            self._trainer.fill()
        # Before the history begins, which makes void what stands behind it.
        self._place_in_data(step)
        self._note_complete(step, "" if source == _START else self._saves.place)
        self._saves.begin_run(step)
        if members.number > 0 or (fallback is not None and source != _START):
            reason = fallback.reason if fallback else "all workers began afresh: no recovery"
            self._events.write("recovery_fallback", step=step, reason=reason, source=source)
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

    # ---- steps

    def _take_steps(self, members: Members, group: WorkerGroup, batches: Batches) -> None:
        progress = self.progress
        is_logger = group.rank == LOG_RANK
        log = StepLog(self._job, self._events if is_logger else None, progress.rest)
        self._stop.defer()
        first = progress.step
        for step in range(first, self._job.trainer.max_steps):
            begun_s = time.perf_counter()
            self._begin_step(step, batches)
            self._blocked_s = time.perf_counter() - begun_s
            self.watch.reach("data")
            asked_s = time.perf_counter()
            rows = batches.read(step)
            log.wait(data_s=time.perf_counter() - asked_s)
            result = self._steps.take(step, rows, members, group)
            log.wait(blocked_s=self._blocked_s)
            self._stop.note_step(step)
            log.report(progress.rest["last"], is_last=bool(result.requests % LEAVE))
            if self._is_recoverable and step == first and members.number > 0:
                self._events.write("rank_resumed", step=step)
            if result.requests % LEAVE:
                self._finish()
                raise SystemExit(EXIT_STATUS)
            if result.requests % SAVE:
                raise PlannedError(f"all ranks have left after step {step}")
        self._finish()
        self._stop.release()

    def _before_update(self) -> None:
        begun_s = time.perf_counter()
        self._saves.before_update()
        self._blocked_s += time.perf_counter() - begun_s

    def _begin_step(self, step: int, batches: Batches) -> None:
        """Begin the saves that are due before a step."""
        self.watch.begin(step, Activity.DATA)
        is_requested = self.progress.rest.get(SAVE_DUE, False)
        complete = self._saves.begin_step(step, is_requested=is_requested)
        if complete is not None and complete > (self._complete or 0):
            self._note_complete(complete, self._saves.place)
            batches.note_checkpoint(complete)

    def _note_complete(self, step: int, place: str) -> None:
        self._complete, self._place = step, place

    def _requests(self) -> int:
        leaves = self._members is not None and self._members.is_to_be_left()
        return self._stop.is_requested + LEAVE * leaves + SAVE * self._saves.wants_save()

    def _finish(self) -> None:
        """Let the last checkpoint end, under no deadline but its own."""
        step = self.progress.step
        self.watch.begin(step, Activity.NOWHERE)
        self._saves.finish(step)

    def _save_last(self, group: WorkerGroup, *, has_state: bool) -> str:
        """Save the state with which the run gives up; returns where the newest lies."""
        step = self.progress.step
        if has_state:
            self._finish()
            problem = None if self._saves.has_saved(step) else f"not by rank {group.rank}"
            if group.first_problem("last/tiers", problem, CHECKPOINT_TIMEOUT) is None:
                return f"the state of step {step} is saved in {self._saves.place}"
        words = f"the state of step {step} could not be saved" if has_state else "no rank had one"
        if not self._place:
            return f"{words}, and none was before: a start begins at step 0"
        return (
            f"{words}; the newest that was before is that of step {self._complete} in {self._place}"
        )

    def save_to_leave(self, members: Members) -> None:
        """Save the state with which all ranks leave, where a start at another size finds it.

        Raises CheckpointError where the store has not got it in the time that HyperPod gives.
        """
        assert self._job.resilience.elastic
        step, limit_s = self.progress.step, self._job.resilience.elastic.restart_grace_s
        self._finish()
        own = self._saves.wait_stored(step, limit_s)
        group, limit = self._make_group(members), timedelta(seconds=limit_s)
        if problem := group.first_problem("leave/stored", own, limit):
            raise CheckpointError(
                f"the state of step {step} is not in the store: {problem}; the next start goes on "
                "from the newest one that is"
            )

    def save_alone(self, order: SaveState, check: Callable[[], None]) -> StateSaved:
        """Save this rank's part of the state as it is, without the other ranks.

        Raises what `check` does, and CorruptionError for a state that has changed since its last
        update.
        """
        # The broken step may have left FSDP2's parameters whole, of which a rank has its shard.
        self._trainer.discard()
        self.progress.check()
        part = problem = ""
        try:
            part = self._saves.place if self._saves.save_part(order.step, check) else ""
        except CheckpointError as error:
            problem = str(error)
        return StateSaved(
            generation=order.generation,
            rank=order.rank,
            name=order.name,
            part=part,
            problem=problem,
        )

    def _corrupt(self, kind: str) -> None:
        self._trainer.stepper.corrupt(kind)

    def _apply(self, step: int) -> None:
        self._steps.apply(step)
