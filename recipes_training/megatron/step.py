"""One step of Megatron: forward and backward of all micro batches, reduction, norm, clip."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from recipes_training.megatron import library
from recipes_training.megatron.model import MegatronModel
from recipes_training.megatron.plan import MegatronPlan
from recipes_training.trainer import StepResult, StepWatch, run_updates
from resilience.errors import StateError


class MegatronStepper:
    """Takes steps with this rank's part of the model; a `recipes_training.trainer.Stepper`."""

    def __init__(
        self, model: MegatronModel, plan: MegatronPlan, *, device: torch.device, watch: StepWatch
    ) -> None:
        self._model, self._plan = model, plan
        self._device, self._watch = device, watch
        self._mask: Tensor | None = None
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._part: list[Tensor] = []
        self.is_last_micro_batch = False
        """Whether the micro batch that was begun last is the step's last."""

    def compute(self, rows: Sequence[Tensor], *, step: int) -> StepResult:
        """Run everything of a step up to the update."""
        self._model.chunk.zero_grad_buffer()
        self._model.optimizer.zero_grad()
        library.reduced_sums.clear()
        batches = _Batches(rows, self, step)
        get_forward_backward_func()(
            forward_step_func=batches.forward,
            data_iterator=iter(rows),
            model=[self._model.chunk],
            num_microbatches=len(rows),
            seq_length=self._plan.seq_length,
            micro_batch_size=self._plan.micro_batch_size,
            forward_only=False,
        )
        self._check_reduced()
        self._part = [batches.loss, *library.reduced_sums]
        totals, summing = self._begin_sum(batches.loss)
        data_size = parallel_state.get_data_parallel_world_size()
        self._model.optimizer.prepare_grads()
        norm = float(self._model.optimizer.get_grad_norm())
        summing.wait()
        loss, requests = totals.tolist()
        self._clip(norm)
        return StepResult(
            loss=loss / (len(rows) * data_size), grad_norm=norm, requests=int(requests)
        )

    def _begin_sum(self, loss: Tensor) -> tuple[Tensor, dist.Work]:
        """Begin to sum the losses of the last stage, and requests, over all ranks.

        Where each collective costs milliseconds this one is over when the norm's is.
        """
        is_teller = (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        own = loss if is_teller else torch.zeros_like(loss)
        totals = torch.stack([own, torch.full_like(own, self._watch.requests())])
        return totals, dist.all_reduce(totals, async_op=True)

    def _clip(self, norm: float) -> None:
        limit = self._plan.optimizer["clip_grad"]
        if limit <= 0 or not math.isfinite(norm):
            return
        for each in self._model.parts:
            clip_grad_by_total_norm_fp32(each.get_parameters(), max_norm=limit, total_norm=norm)

    def clear(self) -> None:
        """Make gradients zero, and forget what an aborted step has left in flight.

        Megatron reduces in another order in a process's first step. It is the first one for all.
        """
        for group in self._model.bucket_groups:
            group.grad_reduce_handle = None
            group.per_param_grad_ready_counts = {}
            group.is_first_batch = True
        self._model.chunk.zero_grad_buffer()
        self._model.optimizer.zero_grad()

    def _check_reduced(self) -> None:
        """Raise StateError where Megatron has left a bucket's gradients as they are."""
        buckets = sum(len(group.buckets) for group in self._model.bucket_groups)
        if len(library.reduced_sums) != buckets:
            raise StateError(f"{len(library.reduced_sums)} of {buckets} buckets were reduced")

    def part(self) -> list[float]:
        """Return this rank's loss, and the sums of what it gave to reductions."""
        return [float(each.item()) for each in self._part]

    def update(self, lr: float) -> None:
        """Write main parameters and moments of this rank's shards; holds no collective.

        The model's parameters follow in `settle`.
        """
        optimizers = [part.optimizer for part in self._model.parts]
        for optimizer in optimizers:
            for options in optimizer.param_groups:
                options["lr"] = lr * options.get("lr_mult", 1.0)
        run_updates(optimizers, self._watch)

    def corrupt(self, kind: str) -> None:
        """Flip a bit of the first shard's parameter, or of its first moment."""
        shard = self._model.shards[0]
        moments = shard.optimizer.state[shard.main]
        tensor = shard.main if kind == "parameter" else moments["exp_avg"]
        with torch.no_grad():
            tensor.detach().view(-1).view(torch.int32)[0] ^= 1 << 20

    def begin_forward(self, number: int, num: int, step: int) -> None:
        """Note a micro batch, 1 to `num`, and seed what it draws."""
        self.is_last_micro_batch = number == num
        self._watch.forward(number, is_last=self.is_last_micro_batch)
        # Its number in the global batch, of which each rank has neighbours: no world's size is in
        # it.
        place = parallel_state.get_data_parallel_rank() * num + number - 1
        stage = parallel_state.get_pipeline_model_parallel_rank()
        text = f"{self._plan.seed}/{step}/{place}/{stage}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    def begin_backward(self, number: int) -> None:
        """Note that the backward pass of a micro batch begins."""
        self._watch.backward(number)

    def mask(self, length: int) -> Tensor:
        """Return which tokens a token does not see: those after it."""
        if self._mask is None:
            full = torch.ones(1, 1, length, length, dtype=torch.bool, device=self._device)
            self._mask = full.triu(1)
        return self._mask

    @property
    def device(self) -> torch.device:
        """Return where batches have to be."""
        return self._device


class _Batches:
    """The micro batches of one step, as Megatron's schedule asks for them."""

    def __init__(self, rows: Sequence[Tensor], stepper: MegatronStepper, step: int) -> None:
        self._num, self._stepper, self._step = len(rows), stepper, step
        self._number = 0
        self.loss = torch.zeros((), dtype=torch.float64, device=stepper.device)
        """Sum of the micro batches' mean losses; zero before the last stage."""

    def forward(self, rows: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
        """Compute the next micro batch; returns the stage's output, and what makes it a loss."""
        self._number = number = self._number + 1
        self._stepper.begin_forward(number, self._num, self._step)
        tokens = next(rows).to(self._stepper.device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        length = inputs.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(inputs)
        output: Tensor = model(inputs, positions, self._stepper.mask(length), labels=targets)
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda _: self._stepper.begin_backward(number)
        )
        return output, self._take_loss

    def _take_loss(self, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.float().mean()
        # Megatron divides the loss that it is given in place.
        self.loss += loss.detach()
        return loss, {}
