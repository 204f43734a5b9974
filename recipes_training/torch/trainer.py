"""Plain PyTorch behind the loop: whole copies, or FSDP2 with full or hybrid sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from launcher.job import TrainingJob
from launcher.job.workload import TorchTrainer as TorchSettings
from recipes_training.group import WorkerGroup
from recipes_training.plan import (
    Placement,
    aux_loss_coef,
    has_weight_decay,
    plan_adamw,
    plan_device_type,
    plan_placement,
)
from recipes_training.torch.model import (
    SpreadModel,
    build_core,
    fill_core,
    give_memory,
    spread_core,
)
from recipes_training.torch.rebind import clear_step, take_groups
from recipes_training.torch.step import TorchStepper
from recipes_training.trainer import StepWatch
from recipes_training.weights.export import write_model
from resilience.faults.hooks import reach_in_backward
from resilience.state.torch_state import TorchState, materialise, refuse_unshared


class TorchTrainer:
    """One rank's model and optimizer; a `recipes_training.trainer.Trainer`.

    One that `is_restartable` can take the groups of further generations. The bits of a step are
    the same with and without.
    """

    def __init__(self, job: TrainingJob, watch: StepWatch, *, is_restartable: bool) -> None:
        assert isinstance(job.trainer, TorchSettings)
        transformers.logging.set_verbosity_error()
        self._job = job
        self._settings = job.trainer
        self._watch = watch
        self._is_restartable = is_restartable
        self._model: SpreadModel | None = None
        self._group: WorkerGroup
        self._optimizer: Optimizer
        self.early_view: TorchState | None = None
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._core = build_core(job, self._settings)
        refuse_unshared(self._core)
        device_type = plan_device_type(job)
        if is_restartable and self._settings.sharding == "none" and device_type == "cpu":
            give_memory(self._core, job.model, torch.device(device_type))
            self._make_optimizer()
            self.early_view = TorchState(self._core, self._optimizer)

    @property
    def num_parameters(self) -> int:
        """Return the number of trained values of the whole model."""
        return sum(parameter.numel() for parameter in self._core.parameters())

    def take_groups(self, group: WorkerGroup) -> None:
        """Build model and optimizer the first time, and rebind the model ever after."""
        self._group = group
        if self._model is None:
            self._build(group)
        else:
            take_groups(self._model)
        self._hook_layers()
        self._set_view(plan_placement(self._settings, group.layout, group.rank))

    def _build(self, group: WorkerGroup) -> None:
        model = spread_core(
            self._core,
            self._settings,
            self._job.model,
            group,
            is_restartable=self._is_restartable,
        )
        if self.early_view is None:
            self._make_optimizer()
        is_sharded = model.num_shards is not None
        self.stepper = TorchStepper(
            model,
            self._optimizer,
            num_terms=self._settings.num_micro_batches,
            clip_norm=self._settings.optimizer.clip_norm,
            aux_loss_coef=aux_loss_coef(self._job.model),
            is_autocast=self._settings.precision == "bf16" and not is_sharded,
            device=group.device,
            watch=self._watch,
        )
        self._model = model

    def _make_optimizer(self) -> None:
        self._optimizer = _make_optimizer(self._job, self._core)
        materialise(self._optimizer)

    def _hook_layers(self) -> None:
        """Let faults strike in the backward passes of this rank, which may have a new number."""
        assert self._model is not None
        for hook in self._hooks:
            hook.remove()
        self._hooks = reach_in_backward(
            self._model.layers,
            places=self._watch.places,
            reach=self._watch.reach,
            is_reducing=lambda: self.stepper.is_reducing,
        )

    def _set_view(self, placement: Placement) -> None:
        known = getattr(self, "view", None)
        if known is None or (known.replica, known.shard) != (placement.replica, placement.shard):
            self.view = TorchState(
                self._core, self._optimizer, replica=placement.replica, shard=placement.shard
            )

    def fill(self) -> None:
        """Set parameters to what they are before the first step, and moments to zero."""
        fill_core(self._job, self._core)
        for moments in self._optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()

    def discard(self) -> None:
        """Drop gradients, and what a broken step has left in FSDP2 or the reducer."""
        assert self._model is not None
        clear_step(self._model)

    def settle(self) -> None:
        """Return: no collective follows an update here. A fault may strike."""
        self._watch.reach("settle")

    def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face's layout."""
        parameters = dict(self._core.named_parameters())
        config: Any = self._core.config
        config.architectures = [_class_name(self._core)]
        write_model(
            folder,
            sizes={name: each.numel() * each.element_size() for name, each in parameters.items()},
            gather=lambda name: _gather(parameters[name]),
            config=config,
            group=self._group,
        )


def _gather(parameter: Tensor) -> Tensor:
    """Return the whole parameter; a collective of the workers that share it."""
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            return parameter.full_tensor()
        return parameter.detach()


def _class_name(core: nn.Module) -> str:
    """Return the model's own class name; sharding puts one of its own before it."""
    return next(each.__name__ for each in type(core).__mro__ if "transformers" in each.__module__)


def _make_optimizer(job: TrainingJob, core: nn.Module) -> Optimizer:
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in core.named_parameters():
        (decayed if has_weight_decay(name, parameter.ndim) else kept).append(parameter)
    options = job.trainer.optimizer
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return AdamW(groups, **plan_adamw(options))
