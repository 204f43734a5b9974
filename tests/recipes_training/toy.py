"""A whole trainer of the size of a page: a bigram model in numpy, its state divided into shards.

    python -m tests.recipes_training.toy --job job.json --run-dir run --node-name n0

It has no torch model: parameters are one flat array. Each rank keeps the slice of its shard
with its momentum, and gathers the others' slices in `settle`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from torch import Tensor

from launcher.job import Job
from recipes_training.__main__ import run_and_exit
from recipes_training.group import CHECKPOINT_TIMEOUT, WorkerGroup
from recipes_training.plan import plan_placement
from recipes_training.trainer import StepResult, StepWatch
from resilience.state.view import NamedTensor

WIDTH = 8


class ToyTrainer:
    """Trainer, Stepper and StateView in one object."""

    def __init__(self, job: Job, watch: StepWatch, *, is_restartable: bool) -> None:
        self._job, self._watch = job, watch
        self.num_parameters = 2 * job.model.vocab_size * WIDTH
        self.gathered = np.zeros(self.num_parameters, np.float32)
        """What the forward reads: all slices."""
        self.gradient = np.zeros(self.num_parameters, np.float32)
        self.stepper = self.view = self
        self.early_view = None

    # ---- Trainer

    def take_groups(self, group: WorkerGroup) -> None:
        placement = plan_placement(self._job.trainer, group.layout, group.rank)
        size = -(-self.num_parameters // group.layout.num_shards)
        first = int(placement.shard or 0) * size
        if not hasattr(self, "slice"):
            self.first = first
            self.slice = np.zeros(min(size, self.num_parameters - first), np.float32)
            self.momentum = np.zeros_like(self.slice)
        self.replica, self.shard, self._group = placement.replica, placement.shard, group

    def fill(self) -> None:
        values = np.random.default_rng(self._job.trainer.seed).normal(0, 0.5, self.num_parameters)
        self.slice[:] = values[self.first : self.first + self.slice.size]
        self.momentum[:] = 0

    def discard(self) -> None:
        self.gradient[:] = 0

    def settle(self) -> None:
        self._watch.reach("settle")
        # A sum in which each number comes from one rank: the others add zeros.
        self.gathered[:] = 0
        if self.replica == 0:
            self.gathered[self.first : self.first + self.slice.size] = self.slice
        dist.all_reduce(torch.from_numpy(self.gathered))

    def export(self, folder: Path) -> None:
        if self._group.rank != 0:
            self._group.follow("export", CHECKPOINT_TIMEOUT)
            return
        with self._group.lead("export"):
            folder.mkdir(exist_ok=True)
            save_file({"flat": self.gathered}, folder / "model.unfinished")
            (folder / "model.unfinished").rename(folder / "model.safetensors")

    # ---- StateView

    def tensors(self) -> Sequence[NamedTensor]:
        place = {"full_shape": (self.num_parameters,), "begin": (self.first,)}
        arrays = {"parameter": self.slice, "momentum": self.momentum}
        return [
            NamedTensor(name=name, tensor=torch.from_numpy(array), **place)
            for name, array in arrays.items()
        ]

    def read_rest(self) -> Mapping[str, Any]:
        return {}

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        pass

    # ---- Stepper

    def compute(self, rows: Sequence[Tensor], *, step: int) -> StepResult:
        self.gradient[:] = 0
        loss = 0.0
        for number, each in enumerate(rows, start=1):
            is_last = number == len(rows)
            self._watch.forward(number, is_last=is_last)
            part, finish = self._forward(each.numpy())
            loss += part
            self._watch.backward(number)
            if is_last:
                self._watch.reach("backward")
            finish()
        self._watch.reach("reduction")
        self.gradient /= len(rows) * dist.get_world_size()
        self.own = [loss, float(self.gradient.sum())]
        dist.all_reduce(torch.from_numpy(self.gradient))
        totals = torch.tensor([loss, self._watch.requests()], dtype=torch.float64)
        dist.all_reduce(totals)
        norm = float(np.linalg.norm(self.gradient.astype(np.float64)))
        mean = totals[0].item() / (len(rows) * dist.get_world_size())
        return StepResult(loss=mean, grad_norm=norm, requests=int(totals[1]))

    def part(self) -> Sequence[float]:
        return self.own

    def _forward(self, rows: Any) -> tuple[float, Any]:
        table, head = self.gathered.reshape(2, -1, WIDTH)
        inputs, targets = rows[:, :-1].ravel(), rows[:, 1:].ravel()
        logits = table[inputs] @ head.T
        scores = np.exp(logits - logits.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
        chosen = (np.arange(targets.size), targets)
        loss = -np.log(scores[chosen]).mean()

        def finish() -> None:
            scores[chosen] -= 1
            of_table, of_head = self.gradient.reshape(2, -1, WIDTH)
            np.add.at(of_table, inputs, scores @ head / targets.size)
            of_head += scores.T @ table[inputs] / targets.size

        return float(loss), finish

    def update(self, lr: float) -> None:
        own = self.gradient[self.first : self.first + self.slice.size]
        self.momentum[:] = 0.9 * self.momentum + own
        self._watch.reach("within_update")
        self.slice -= np.float32(30 * lr) * self.momentum

    def corrupt(self, kind: str) -> None:
        array = self.slice if kind == "parameter" else self.momentum
        array.view(np.int32)[0] ^= 1 << 20


if __name__ == "__main__":
    run_and_exit(ToyTrainer)
