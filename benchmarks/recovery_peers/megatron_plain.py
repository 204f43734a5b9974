"""A step of Megatron as a plain loop takes it: its schedule, its optimizer's step, nothing of ours.

The model is that of this project's trainer, with the same weights, parameter groups and learning
rates, so that a loss has the same bits. Imported behind the stand-ins of a CPU. Who has not made a
`MegatronTrainer` in the process has Megatron's own reductions and gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from launcher.job import Job
from launcher.job.workload import MegatronTrainer
from recipes_training.megatron.model import build_model
from recipes_training.megatron.plan import plan_megatron
from recipes_training.megatron.weights import fill_model
from recipes_training.plan import plan_schedule


class PlainMegatron:
    """One rank's model and its steps, without dropout; the groups of `parallel_state` are open."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.trainer, MegatronTrainer)
        assert job.trainer.dropout == 0.0, "a plain loop draws other numbers"
        self._schedule = plan_schedule(job)
        self._sizes = {
            "seq_length": job.data.seq_length,
            "micro_batch_size": job.trainer.micro_batch_size,
        }
        self.model = build_model(plan_megatron(job, job.trainer))
        fill_model(job, self.model)

    def take(self, rows: Sequence[Tensor], step: int) -> Tensor:
        """Take a step with micro batches of (samples, sequence + 1).

        Returns the mean of this rank's own losses; zero before the last stage.
        """
        chunk, optimizer = self.model.chunk, self.model.optimizer
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(rows),
            model=[chunk],
            num_microbatches=len(rows),
            forward_only=False,
            **self._sizes,
        )
        for group in optimizer.param_groups:
            group["lr"] = self._schedule.lr_at(step)
        optimizer.step()
        # In 64 bits, as the trainer has it.
        total = sum((each["loss"] for each in losses), torch.zeros((), dtype=torch.float64))
        return total / len(rows)

    def _forward(self, rows: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
        tokens = next(rows)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        return model(inputs, positions, None, labels=targets), self.reduce

    def reduce(self, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the last stage's output, and what `take` makes of it."""
        loss = output.float().mean()
        # Megatron divides the loss that it is given in place.
        return loss, {"loss": loss.detach().clone()}


def average(loss: Tensor) -> float:
    """Return the mean over the global batch of what `take` has returned; every rank calls it."""
    is_teller = (
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )
    total = loss if is_teller else torch.zeros_like(loss)
    dist.all_reduce(total)
    return float(total) / parallel_state.get_data_parallel_world_size()
