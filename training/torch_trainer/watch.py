"""Where a worker is within its steps, for a run that goes on through faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from resilience.checkpointless.recovery import Recovery
from resilience.comm.page import Activity
from resilience.faults.injector import Injector
from resilience.inprocess.generation import Generation
from training.torch_trainer.step import StepResult, StepWatch


class Watched(Protocol):
    """The run whose steps these are."""

    recovery: Recovery

    def note_result(self, step: int, result: StepResult) -> None:
        """Let what the step came to go with the state."""
        ...


class RunWatch(StepWatch):
    """Shows where the worker is, passes the gate, and lets faults in."""

    def __init__(self, run: Watched) -> None:
        self._run = run
        self.step = 0
        self.is_last_micro_batch = False
        self._generation: Generation | None = None
        self._activity = Activity.NOWHERE

    def enter(self, generation: Generation, injector: Injector) -> None:
        """Take what belongs to the generation."""
        self._generation = generation
        self.injector = injector
        self.splits_update = injector.is_scheduled("within_update")

    def leave(self) -> None:
        """Keep nothing of a generation that is over, its groups above all."""
        self._generation = None

    def begin(self, step: int, activity: Activity) -> None:
        """Note which step is taken, and where in it the worker begins."""
        self.step = step
        self._mark(activity)

    def pulse(self) -> None:
        """Show that the worker gets on where it is; raises BrokenError as `mark` does."""
        self._mark(self._activity)

    def _mark(self, activity: Activity) -> None:
        assert self._generation is not None
        self._activity = activity
        self._generation.mark(activity, self.step)

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Begin a forward pass."""
        assert self._generation is not None
        self.is_last_micro_batch = is_last
        self._generation.mark(Activity.FORWARD, self.step, micro_batch)
        self.injector.reach("forward", self.step)

    def backward(self, micro_batch: int) -> None:
        """Begin a backward pass."""
        assert self._generation is not None
        self._generation.mark(Activity.BACKWARD, self.step, micro_batch)

    def diverged(self) -> None:
        """End for it only if no rank's state is corrupt, which can make any gradient so."""
        self._run.recovery.check()
        dist.barrier()

    @contextmanager
    def commit(self, result: StepResult) -> Iterator[None]:
        """Pass the gate, and run the update under its rules."""
        assert self._generation is not None
        self._run.note_result(self.step, result)
        self._activity = Activity.GATE
        with self._run.recovery.commit(self._generation):
            yield

    def within_update(self) -> None:
        """Let a fault in where the update is half done."""
        self.injector.reach("within_update", self.step)
