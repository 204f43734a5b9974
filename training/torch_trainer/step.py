"""One step: forward and backward, reduction, norm, clip, update.

Up to the update every exchange between workers is done: what comes between
clipping and update can still stop the step with no parameter changed, and the
update itself needs no other worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from training.errors import DivergedError
from training.torch_trainer.initial import local_part
from training.torch_trainer.model import SpreadModel

_SAVE = 1 << 24
"""What a request to save counts in the sum of requests; each worker's stop counts 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step came to, equal on all workers."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Norm over all parameters before clipping."""
    is_stop_requested: bool
    """At least one worker was asked to stop."""
    is_save_requested: bool = False
    """At least one worker wants a checkpoint of the state after this step."""


class StepWatch:
    """Is told where in a step the worker is. This one does nothing with it.

    A watch may raise at any of these places; only from the begin of `commit`
    on is something written that the next step needs.
    """

    splits_update = False
    """Take the update in two parts, with `within_update` between them; same bits."""

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Begin a forward pass, the step's last or another."""

    def backward(self, micro_batch: int) -> None:
        """Begin a backward pass."""

    def diverged(self) -> None:
        """Say that the gradients are not finite, before the run ends for it."""

    def commit(self, result: StepResult) -> AbstractContextManager[None]:
        """Return what the update runs in; all exchange between workers is done."""
        return nullcontext()

    def within_update(self) -> None:
        """Stand where a part of the update is done, and a part is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    """All that a step needs but its samples and learning rate."""

    model: SpreadModel
    optimizer: Optimizer
    clip_norm: float | None
    aux_loss_coef: float
    is_autocast: bool
    """Compute in bfloat16 where no sharding does it already."""
    device: torch.device
    world_size: int
    is_stop_requested: Callable[[], bool]
    is_save_requested: Callable[[], bool] = lambda: False
    watch: StepWatch = field(default_factory=StepWatch)

    def run(self, micro_batches: Sequence[Tensor], *, step: int, lr: float) -> StepResult:
        """Take one step on this worker's rows of tokens.

        Raises DivergedError, in all workers alike and with no parameter changed,
        where the gradients are not finite.
        """
        self.optimizer.zero_grad()
        loss_sum = self._accumulate(micro_batches)
        loss, num_stops, num_saves = self._reduce(loss_sum, len(micro_batches))
        gradients = self.gradients()
        norm = gradient_norm(gradients, self.model.num_sharded_copies)
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            self.watch.diverged()
        check_norm(grad_norm, step)
        if self.clip_norm is not None:
            clip_gradients(gradients, norm, self.clip_norm)
        result = StepResult(
            loss=loss,
            grad_norm=grad_norm,
            is_stop_requested=num_stops > 0,
            is_save_requested=num_saves > 0,
        )
        with self.watch.commit(result):
            self.update(lr)
        return result

    def _accumulate(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Add up gradients and return the sum of losses."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, rows in enumerate(micro_batches, start=1):
            with self.model.micro_batch(is_last=number == len(micro_batches)):
                self.watch.forward(number, is_last=number == len(micro_batches))
                loss = self._loss(rows.to(self.device))
                self.watch.backward(number)
                torch.autograd.backward(loss / len(micro_batches))
            loss_sum += loss.detach()
        return loss_sum

    def _loss(self, rows: Tensor) -> Tensor:
        """Return the mean loss of a micro batch, with that of the experts' balance.

        Targets are handed to nobody but the cross entropy here: rows hold one
        token more than the model sees, so nothing is shifted or padded.
        """
        inputs, targets = rows[:, :-1], rows[:, 1:]
        has_aux_loss = self.aux_loss_coef > 0
        options = {"output_router_logits": True} if has_aux_loss else {}
        with self._autocast():
            output = self.model.run(input_ids=inputs, use_cache=False, **options)
        logits = output.logits.float()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if has_aux_loss:
            loss = loss + self.aux_loss_coef * output.aux_loss
        return loss

    def _autocast(self) -> AbstractContextManager[object]:
        if self.is_autocast:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _reduce(self, loss_sum: Tensor, num_micro_batches: int) -> tuple[float, int, int]:
        """Return the mean loss, and how many workers want to stop, and to save, after this step."""
        requests = self.is_stop_requested() + _SAVE * self.is_save_requested()
        totals = torch.stack([loss_sum, torch.full_like(loss_sum, requests)])
        dist.all_reduce(totals)
        loss, num_requests = totals.tolist()
        num_saves, num_stops = divmod(int(num_requests), _SAVE)
        return loss / (num_micro_batches * self.world_size), num_stops, num_saves

    def gradients(self) -> list[Tensor]:
        """Return this worker's reduced gradients, sharing memory with them."""
        parameters = self.model.core.parameters()
        return [local_part(each.grad) for each in parameters if each.grad is not None]

    def update(self, lr: float) -> None:
        """Write parameters and moments from the gradients in memory; holds no collective."""
        for options in self.optimizer.param_groups:
            options["lr"] = lr
        if not self.watch.splits_update:
            self.optimizer.step()
            return
        groups = self.optimizer.param_groups
        try:
            for number, options in enumerate(groups):
                if number:
                    self.watch.within_update()
                self.optimizer.param_groups = [options]
                self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups


def gradient_norm(gradients: Sequence[Tensor], num_sharded_copies: int | None) -> Tensor:
    """Return the norm of all gradients of one copy, summed in float64.

    Shards are added up over all copies and divided by their number, so that
    every copy clips by the very same number, whatever order a sum has within it.
    """
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
    square = torch.stack(norms).square().sum()
    if num_sharded_copies is not None:
        dist.all_reduce(square)
        square /= num_sharded_copies
    return square.sqrt()


def check_norm(grad_norm: float, step: int) -> None:
    """Refuse gradients that would make every parameter something that is no number."""
    if not math.isfinite(grad_norm):
        raise DivergedError(
            f"gradient norm is {grad_norm} at step {step}; lower trainer.optimizer.lr, raise "
            "trainer.optimizer.warmup_steps, or look for broken data or weights"
        )


def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, clip_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `clip_norm`."""
    factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
