"""The trainer of `small_model`, each of whose micro batches takes longer by a sleep.

    python -m benchmarks.recovery_peers.small_trainer --job JOB --run-dir DIR --node-name NAME

The command line of `python -m recipes_training`; BENCHMARK_SLEEP_S says how long. Whole copies
alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# An agent imports this module before it forks its workers.
import recipes_training.recovery  # noqa: F401
from benchmarks.recovery_peers.slow_trainer import SLEEP_VARIABLE, SlowWatch
from benchmarks.recovery_peers.small_model import SmallModel, descend
from launcher.job import Job
from recipes_training.__main__ import run_and_exit
from recipes_training.group import WorkerGroup
from recipes_training.plan import plan_placement
from recipes_training.trainer import StepResult, StepWatch
from resilience.state.view import NamedTensor


class SmallTrainer:
    """Trainer, Stepper and StateView in one object."""

    def __init__(self, job: Job, watch: StepWatch, *, is_restartable: bool) -> None:
        self._watch = SlowWatch(watch, partial(time.sleep, float(os.environ[SLEEP_VARIABLE])))
        self._settings = job.trainer
        self._num_terms = job.trainer.num_micro_batches
        self._model = SmallModel()
        self._parameters = list(self._model.parameters())
        self._momenta = [torch.zeros_like(each) for each in self._parameters]
        self._part: list[float] = []
        self.stepper = self.view = self.early_view = self
        self.replica, self.shard = 0, ""

    @property
    def num_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(each.numel() for each in self._parameters)

    def take_groups(self, group: WorkerGroup) -> None:
        """Take the rank's place among the copies."""
        placement = plan_placement(self._settings, group.layout, group.rank)
        self.replica, self.shard = placement.replica, placement.shard

    def fill(self) -> None:
        """Make the state before the first step."""
        self._model.fill()
        for each in self._momenta:
            each.zero_()

    def discard(self) -> None:
        """Drop the gradients."""
        self._model.zero_grad()

    def settle(self) -> None:
        """Nothing follows an update."""
        self._watch.reach("settle")

    def export(self, folder: Path) -> None:
        """Write nothing: these runs never end."""

    def tensors(self) -> Sequence[NamedTensor]:
        """Return parameters and momenta."""
        names = [name for name, _ in self._model.named_parameters()]
        parameters = [each.detach() for each in self._parameters]
        return [
            *(NamedTensor(name=n, tensor=t) for n, t in zip(names, parameters, strict=True)),
            *(
                NamedTensor(name=f"momentum.{n}", tensor=t)
                for n, t in zip(names, self._momenta, strict=True)
            ),
        ]

    def owners(self) -> Sequence[Tensor]:
        """Return what `tensors` lists, as training uses it."""
        return [*self._parameters, *self._momenta]

    def read_rest(self) -> Mapping[str, Any]:
        """Return nothing: tensors are all."""
        return {}

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take nothing."""

    def compute(self, rows: Sequence[Tensor], *, step: int) -> StepResult:
        """Add up the gradients of this rank's micro batches, and sum them over all ranks."""
        self._model.zero_grad()
        loss_sum = 0.0
        for number, each in enumerate(rows, start=1):
            self._watch.forward(number, is_last=number == len(rows))
            loss = self._model(each)
            self._watch.backward(number)
            (loss / self._num_terms).backward()
            loss_sum += float(loss.detach())
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients])
        self._part = [loss_sum, float(flat.sum())]
        dist.all_reduce(flat)
        totals = torch.tensor([loss_sum, self._watch.requests()], dtype=torch.float64)
        dist.all_reduce(totals)
        sums = flat.split([each.numel() for each in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))
        loss, requests = totals.tolist()
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return StepResult(loss=loss / self._num_terms, grad_norm=norm, requests=int(requests))

    def part(self) -> Sequence[float]:
        """Return this rank's loss and the sum of its own gradients."""
        return self._part

    def update(self, lr: float) -> None:
        """Write parameters and momenta."""
        descend(self._parameters, self._momenta, lr)

    def corrupt(self, kind: str) -> None:
        """Flip a bit of the first parameter, or of its momentum."""
        tensor = self._parameters[0] if kind == "parameter" else self._momenta[0]
        with torch.no_grad():
            tensor.view(torch.int32).view(-1)[0] ^= 1 << 20


if __name__ == "__main__":
    run_and_exit(SmallTrainer)
