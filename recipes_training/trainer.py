"""What a framework implements, and what the loop tells it: two protocols and their values.

The loop (`recipes_training.loop`) takes every step in one order: `compute`, the gate, `update`,
`settle`. It owns seeds, the gate, saves, faults, recovery and the log; a trainer owns the
model, the optimizer and the collectives of a step. docs/architecture.md says how to write
one, and names a whole one of the size of a page.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from launcher.job import TrainingJob
from recipes_training.group import WorkerGroup
from resilience.state.view import StateView


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the computation of one step came to, equal on all ranks."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Norm over all parameters before clipping."""
    requests: int
    """Sum over all ranks of what each got from `StepWatch.requests`."""

    @property
    def is_finite(self) -> bool:
        """Return whether the step may be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class StepWatch(Protocol):
    """What the loop wants to hear of a step, and tells its trainer. Training thread only.

    Every method but `requests` may raise, to end the generation: the trainer lets that
    through, and is told to `discard` the step.
    """

    @property
    def places(self) -> Collection[str]:
        """Return the places at which a fault may still strike this rank.

        A trainer that finds none of its own there need not hook its model.
        """

    def requests(self) -> int:
        """Return this rank's number for the sum `StepResult.requests`; below 2 ** 25."""

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Note that a forward pass begins: of micro batch 1, 2, ..., the step's last or not."""

    def backward(self, micro_batch: int) -> None:
        """Note that a backward pass begins."""

    def reach(self, place: str) -> None:
        """Let a fault strike here.

        `backward` is in the middle of a step's last backward, `reduction` where most gradients
        are handed to the reduction that follows, `within_update` where a part of an update
        is done and a part is not, `settle` in what follows it. Returns at once where no fault is
        due.
        """


class Stepper(Protocol):
    """Takes steps. Training thread only."""

    def compute(self, rows: Sequence[Tensor], *, step: int) -> StepResult:
        """Run everything of a step up to the update: forward to clipping, all its collectives.

        `rows` are this rank's micro batches, each of shape (samples, sequence + 1). Writes
        nothing that the next step needs but gradients, so that the step can be run again, with
        the same bits. Gradients that are not finite are left as they are: no update is made of
        them.
        """

    def part(self) -> Sequence[float]:
        """Return numbers of what this rank alone gave to the last `compute`, before any reduction.

        Its loss, and what else shows where a value that is not finite has come from: sums of
        its own gradients. Computed again they are equal, bit for bit.
        """

    def update(self, lr: float) -> None:
        """Write parameters and moments from the gradients in memory; holds no collective."""

    def corrupt(self, kind: str) -> None:
        """Flip one bit of a parameter or a moment, as a broken memory would: for tests."""


class Trainer(Protocol):
    """A framework's model and optimizer on one rank, over all generations of the process.

    Made before the rank is known; what needs no rank is done then, since a spare waits so.
    """

    @property
    def num_parameters(self) -> int:
        """Return the number of trained values of the whole model."""

    @property
    def stepper(self) -> Stepper:
        """Return what takes steps; after the first `take_groups`."""

    @property
    def view(self) -> StateView:
        """Return this rank's state, all of whose tensors exist; after the first `take_groups`."""

    @property
    def early_view(self) -> StateView | None:
        """Return the state as a rank of any number will have it; None where it takes a rank's.

        Its tensors exist, so that a spare can have the memory for them before it is needed.
        """

    def take_groups(self, group: WorkerGroup) -> None:
        """Take the process groups of a generation: build the first time, rebind ever after.

        Torch's default group is open. Every rank calls it, the ones that build and the ones
        that rebind, so both open groups in the same order. Reduced gradients stay, so
        that an update which has begun can be ended.
        """

    def fill(self) -> None:
        """Make the state before the first step, whatever the tensors hold; any number of times."""

    def discard(self) -> None:
        """Drop what an aborted step has left, gradients too; needs no other rank."""

    def settle(self) -> None:
        """Run the collectives that follow an update or a recovery; reaches `settle`.

        Every rank calls it; a second call leaves the same bits.
        """

    def export(self, folder: Path) -> None:
        """Write the model for its users into a folder; every rank calls it.

        The folder appears whole or not at all, in place of an older one. Raises
        CheckpointError where it cannot be written.
        """


class MakeTrainer(Protocol):
    """Makes a framework's trainer, before the rank is known."""

    def __call__(self, job: TrainingJob, watch: StepWatch, *, is_restartable: bool) -> Trainer:
        """Return the trainer; one that `is_restartable` takes groups more than once."""


def run_updates(optimizers: Iterable[Optimizer], watch: StepWatch) -> None:
    """Step each optimizer.

    One parameter group comes after the other where a fault may strike between them: the bits are
    the same.
    """
    if "within_update" not in watch.places:
        for optimizer in optimizers:
            optimizer.step()
        return
    is_begun = False
    for optimizer in optimizers:
        groups = optimizer.param_groups
        try:
            for options in groups:
                if is_begun:
                    watch.reach("within_update")
                optimizer.param_groups = [options]
                optimizer.step()
                is_begun = True
        finally:
            optimizer.param_groups = groups
