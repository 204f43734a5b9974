"""One step: forward and backward, reduction, norm, clip; then the update.

Every exchange between workers is done before the update: what comes between
clipping and update can still stop the step with no parameter changed, and the
update itself needs no other worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from recipes_training.torch.initial import local_part
from recipes_training.torch.model import SpreadModel
from recipes_training.trainer import StepResult, StepWatch, run_updates


class TorchStepper:
    """Takes steps with one model and optimizer; a `recipes_training.trainer.Stepper`.

    `num_terms` is the number of micro batches of a step over all workers, each of which weighs the
    same, whoever computes it. `aux_loss_coef` is the weight of the loss that balances experts. With
    `is_autocast` it computes in bfloat16 where no sharding does so already.
    """

    def __init__(
        self,
        model: SpreadModel,
        optimizer: Optimizer,
        *,
        num_terms: int,
        clip_norm: float | None,
        aux_loss_coef: float,
        is_autocast: bool,
        device: torch.device,
        watch: StepWatch,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._num_terms = num_terms
        self._clip_norm = clip_norm
        self._aux_loss_coef = aux_loss_coef
        self._is_autocast = is_autocast
        self._device = device
        self._watch = watch
        self.is_reducing = False
        """Whether the micro batch that is computed is the step's last."""
        self._part: list[Tensor] = []

    def compute(self, rows: Sequence[Tensor], *, step: int) -> StepResult:
        """Run forward and backward on this worker's rows of tokens, reduce and clip."""
        self._optimizer.zero_grad()
        self._model.sums.clear()
        losses = self._accumulate(rows)
        self._part = [torch.stack(losses).sum(), *self._model.sums]
        loss, requests = self._reduce(losses)
        gradients = self.gradients()
        norm = gradient_norm(gradients, self._model.num_shards)
        grad_norm = norm.item()
        if self._clip_norm is not None and math.isfinite(grad_norm):
            clip_gradients(gradients, norm, self._clip_norm)
        return StepResult(loss=loss, grad_norm=grad_norm, requests=requests)

    def _accumulate(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """Add up gradients and return the losses in 64 bits."""
        num_rounds = self._num_rounds(len(micro_batches))
        losses = []
        for number in range(1, num_rounds + 1):
            is_last = self.is_reducing = number == num_rounds
            is_own = number <= len(micro_batches)
            with self._model.micro_batch(is_last=is_last):
                self._watch.forward(number, is_last=is_last)
                loss = self._loss(micro_batches[number - 1 if is_own else 0].to(self._device))
                self._watch.backward(number)
                torch.autograd.backward(loss / self._share if is_own else loss * 0.0)
            if is_own:
                losses.append(loss.detach().double())
        return losses

    @property
    def _share(self) -> float:
        """Return by what a micro batch's loss is divided, before gradients are summed or averaged.

        Where they are averaged over workers it is the micro batches of one worker, as a fraction
        where some have one more than others.
        """
        if self._model.tree is not None:
            return self._num_terms
        return self._num_terms / dist.get_world_size()

    def _num_rounds(self, num_own: int) -> int:
        """Return how many micro batches are run: sharded workers need each other in every one.

        Who has one less than others runs its first once more, which then weighs nothing.
        """
        if self._model.num_shards is None:
            return num_own
        return math.ceil(self._num_terms / dist.get_world_size())

    def _loss(self, rows: Tensor) -> Tensor:
        """Return the mean loss of a micro batch, with that of the experts' balance.

        Targets are handed to nobody but the cross entropy here: rows hold one
        token more than the model sees, so nothing is shifted or padded.
        """
        inputs, targets = rows[:, :-1], rows[:, 1:]
        has_aux_loss = self._aux_loss_coef > 0
        options = {"output_router_logits": True} if has_aux_loss else {}
        with self._autocast():
            output = self._model.run(input_ids=inputs, use_cache=False, **options)
        logits = output.logits.float()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if has_aux_loss:
            loss = loss + self._aux_loss_coef * output.aux_loss
        return loss

    def _autocast(self) -> AbstractContextManager[object]:
        if self._is_autocast:
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _reduce(self, losses: Sequence[Tensor]) -> tuple[float, int]:
        """Return the mean loss over all workers, and the sum of their requests."""
        loss_sum = sum(losses, torch.zeros_like(losses[0]))
        requests = torch.full_like(loss_sum, self._watch.requests())
        if (tree := self._model.tree) is not None:
            loss_sum, requests = tree.sum_up(losses, requests)
            return loss_sum.item() / self._num_terms, int(requests.item())
        totals = torch.stack([loss_sum, requests])
        dist.all_reduce(totals)
        loss, num = totals.tolist()
        return loss / self._num_terms, int(num)

    def part(self) -> list[float]:
        """Return this worker's loss, and the sums of what it gave to reductions."""
        return [float(each.item()) for each in self._part]

    def gradients(self) -> list[Tensor]:
        """Return this worker's reduced gradients, sharing memory with them."""
        parameters = self._model.core.parameters()
        return [local_part(each.grad) for each in parameters if each.grad is not None]

    def update(self, lr: float) -> None:
        """Write parameters and moments from the gradients in memory; holds no collective."""
        for options in self._optimizer.param_groups:
            options["lr"] = lr
        run_updates([self._optimizer], self._watch)

    def corrupt(self, kind: str) -> None:
        """Flip a bit of the first parameter, or of its first moment."""
        parameter = self._optimizer.param_groups[0]["params"][0]
        moments = self._optimizer.state[parameter]
        tensor = local_part(parameter if kind == "parameter" else moments["exp_avg"])
        with torch.no_grad():
            tensor.view(torch.int32).view(-1)[0] ^= 1 << 20


def gradient_norm(gradients: Sequence[Tensor], num_shards: int | None) -> Tensor:
    """Return the norm of all gradients of one copy, summed in float64.

    Shards are added up over all copies and divided by their number, so that
    every copy clips by the very same number, whatever order a sum has within it.
    """
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
    square = torch.stack(norms).square().sum()
    if num_shards is not None:
        dist.all_reduce(square)
        square /= dist.get_world_size() // num_shards
    return square.sqrt()


def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, clip_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `clip_norm`."""
    factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
