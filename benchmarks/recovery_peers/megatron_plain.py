"""A step of Megatron as a plain loop takes it, with the model of this project's trainer.

Imported behind the stand-ins of a CPU. Who has not made a `MegatronTrainer` in the process has
Megatron's own reductions and gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.job import Job
from launcher.job.workload import MegatronTrainer
from training.megatron.model import build_model
from training.megatron.plan import plan_megatron
from training.megatron.step import MegatronStepper
from training.megatron.weights import fill_model
from training.plan import plan_schedule


class Silent:
    """A watch that hears nothing and lets no fault strike."""

    places = ()

    def requests(self) -> int:
        """Ask for nothing."""
        return 0

    def reach(self, place: str) -> None:
        """Do nothing."""

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Do nothing."""

    def backward(self, micro_batch: int) -> None:
        """Do nothing."""


class PlainMegatron:
    """One rank's model and its steps; the groups of `parallel_state` are open."""

    def __init__(self, job: Job, watch: Silent) -> None:
        assert isinstance(job.trainer, MegatronTrainer)
        plan = plan_megatron(job, job.trainer)
        self._is_late = job.trainer.overlap_param_gather
        self._schedule = plan_schedule(job)
        self.model = build_model(plan)
        fill_model(job, self.model)
        device = torch.device("cpu")
        self._stepper = MegatronStepper(self.model, plan, device=device, watch=watch)
        self.settle()

    def settle(self) -> None:
        """Bring the main parameters into the model; with overlap the next forward gathers them."""
        for part in self.model.parts:
            part._copy_main_params_to_model_params()  # noqa: SLF001
        if not self._is_late:
            self.model.chunk.start_param_sync(force_sync=True)

    def take(self, rows: Sequence[Tensor], step: int) -> float:
        """Take a step with micro batches of (samples, sequence + 1); returns its loss."""
        loss = self._stepper.compute(rows, step=step).loss
        self._stepper.update(self._schedule.lr_at(step))
        self.settle()
        return loss
