"""Takes one step: compute, gate, update, settle; and a step that is not finite once more.

What such a step comes to is decided in `recipes_training.steps.non_finite`, alike on all ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from launcher.job import TrainingJob
from recipes_training.coordinator import Members
from recipes_training.data.position import read_position
from recipes_training.errors import DivergedError
from recipes_training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from recipes_training.plan import LOG_RANK, Placement, plan_placement, plan_schedule, plan_split
from recipes_training.progress import Progress
from recipes_training.steplog import StepWords
from recipes_training.steps.non_finite import (
    SKIPS_IN_A_ROW_MAX,
    Evidence,
    Outcome,
    Verdict,
    describe_samples,
    follows_too_many,
    judge,
    name_ranks,
    read_evidence,
    same_bits,
)
from recipes_training.steps.watch import RunWatch
from recipes_training.trainer import StepResult, Trainer
from resilience.comm.page import Activity
from resilience.errors import BrokenError, CorruptionError
from resilience.events import EventLog
from resilience.state.digest import digest_state

SAVE_DUE = "save_due"
"""In the progress: a worker has asked for a checkpoint of this very state."""
SAVE = 1 << 24
"""What a request to save counts in the sum of requests."""
LEAVE = 1 << 20
"""What one to leave the generation counts; each worker's stop counts 1."""
SKIPPED = "skipped"
"""In the progress: the steps that the run has left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """What came of a step when it was computed, with this rank's own part of it."""

    result: StepResult
    part: Sequence[float]


class Steps:
    """Takes the steps of one rank, over all generations of the process."""

    def __init__(
        self,
        job: TrainingJob,
        *,
        trainer: Trainer,
        progress: Progress,
        watch: RunWatch,
        events: EventLog,
    ) -> None:
        self._job = job
        self._trainer, self._progress = trainer, progress
        self._watch, self._events = watch, events
        self._schedule = plan_schedule(job)
        self._words = StepWords(job)
        self._left_out: int | None = None
        """The step that was computed last, where no update may be made of it."""

    def take(
        self, step: int, rows: Sequence[Tensor], members: Members, group: WorkerGroup
    ) -> StepResult:
        """Compute, pass the gate, update, settle."""
        first = self._compute(step, rows)
        result = first.result
        if not result.is_finite:
            result = self._take_again(step, rows, group, first)
        pending: dict[str, Any] = {
            "last": self._words.describe(step, result, self.lr_at(step), self._progress.rest),
            SAVE_DUE: result.requests >= SAVE,
        }
        self._left_out = None
        if not result.is_finite:
            self._left_out = step
            pending[SKIPPED] = [*self._skipped, step]
        self._progress.pend(pending)
        self._watch.note(Activity.GATE)
        with self._progress.commit(members):
            self.apply(step)
        self._trainer.settle()
        return result

    def apply(self, step: int) -> None:
        """End the update of a step from the gradients in memory, without a collective."""
        if step != self._left_out:
            self._trainer.stepper.update(self.lr_at(step))

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self._schedule.lr_at(step)

    def _placement(self, group: WorkerGroup, rank: int) -> Placement:
        return plan_placement(self._job.trainer, group.layout, rank)

    @property
    def _skipped(self) -> list[int]:
        return list(self._progress.rest.get(SKIPPED, ()))

    def _compute(self, step: int, rows: Sequence[Tensor]) -> _Try:
        self._progress.begin()
        result = self._trainer.stepper.compute(rows, step=step)
        return _Try(result=result, part=[] if result.is_finite else self._trainer.stepper.part())

    def _take_again(
        self, step: int, rows: Sequence[Tensor], group: WorkerGroup, first: _Try
    ) -> StepResult:
        """Compute a step once more that was not finite; returns it if it may be committed.

        One that is not finite is to be left out. Raises what ends the generation or the run.
        """
        second = self._compute(step, rows)
        part = self._trainer.stepper.part()
        evidence = self._exchange(step, group, first, part)
        verdict = judge(first.result, second.result, evidence)
        position = read_position(self._progress.rest, batch=self._job.trainer.global_batch_size)
        placements = [self._placement(group, rank) for rank in verdict.ranks]
        where = describe_samples(
            plan_split(self._job, self._placement(group, group.rank).data_size, position),
            step=step,
            ranks=sorted({each.data_rank for each in placements}),
        )
        if verdict.outcome is Outcome.CORRUPT:
            self._tell(step, group, first.result, verdict, "corrupt", verdict.text)
            self._end_generation(f"step {step}: {verdict.text}", verdict, group)
        text = f"{verdict.text}, {where}"
        if verdict.outcome is Outcome.GONE:
            self._tell(step, group, first.result, verdict, "gone", f"{text}; the run goes on")
            return second.result
        problem = self._find_problem(step)
        if problem is None:
            self._tell(step, group, first.result, verdict, "skipped", f"{text}; it is skipped")
            return second.result
        self._tell(step, group, first.result, verdict, "failed", text)
        # A state that has changed can make any gradient so; the run ends only if none has.
        self._progress.check()
        dist.barrier()
        raise DivergedError(f"step {step}: {text}; {problem}")

    def _exchange(
        self, step: int, group: WorkerGroup, first: _Try, part: Sequence[float]
    ) -> list[Evidence]:
        """Tell the other ranks what this one knows by itself; returns what all have told."""
        view = self._trainer.view
        # No deadline but the store's holds while the states are read.
        self._watch.begin(step, Activity.NOWHERE)
        own = Evidence(
            has_changed=not same_bits(first.part, part),
            is_finite=all(map(math.isfinite, part)),
            shard=view.shard or "",
            state=digest_state(view),
        )
        told = group.told_by_all(f"non_finite/{step}", own.to_text(), CHECKPOINT_TIMEOUT)
        self._watch.begin(step, Activity.GATE)
        return read_evidence(told)

    def _find_problem(self, step: int) -> str | None:
        """Return why the run ends for a step that would not be finite again, None to skip it."""
        if self._job.trainer.non_finite == "fail":
            return (
                "lower trainer.optimizer.lr, raise trainer.optimizer.warmup_steps, look for broken "
                "data or weights, or leave such steps out with trainer.non_finite=skip"
            )
        if follows_too_many(self._skipped, step):
            return (
                f"the {SKIPS_IN_A_ROW_MAX} steps before it were skipped for the same, so it is not "
                "the data alone; lower trainer.optimizer.lr"
            )
        return None

    def _end_generation(self, text: str, verdict: Verdict, group: WorkerGroup) -> NoReturn:
        """Have the ranks in question repaired; the others wait for the end that these bring."""
        is_mine = group.rank in verdict.ranks
        if is_mine:
            self._progress.distrust()
        # Else one of several might be told of the end before it knows the verdict.
        dist.barrier()
        if self._job.resilience.checkpointless is None:
            raise DivergedError(f"{text}; without recovery nothing is repaired, so the run ends")
        if is_mine:
            raise CorruptionError(text)
        dist.barrier()
        raise BrokenError(f"{name_ranks(verdict.ranks)} went on with a step that is corrupt")

    def _tell(
        self,
        step: int,
        group: WorkerGroup,
        result: StepResult,
        verdict: Verdict,
        outcome: str,
        text: str,
    ) -> None:
        """Write the event, and for a run that goes on one line on standard error."""
        if group.rank != LOG_RANK:
            return
        self._events.write(
            "non_finite",
            step=step,
            outcome=outcome,
            loss=result.loss,
            grad_norm=result.grad_norm,
            ranks=list(verdict.ranks),
            text=text,
        )
        if outcome in ("gone", "skipped"):
            sys.stderr.write(f"recipes_training: step {step}: {text}\n")
            sys.stderr.flush()
