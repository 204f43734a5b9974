"""Megatron-Core models with a distributed optimizer: a `recipes_training.trainer.Trainer`.

On a CPU `recipes_training.megatron.cpu.stand_in` comes before the first import of this module.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from launcher.job import TrainingJob
from launcher.job.parameters import count_parameters
from launcher.job.workload import MegatronTrainer as MegatronSettings
from recipes_training.group import WorkerGroup
from recipes_training.megatron.groups import open_groups
from recipes_training.megatron.library import adapt
from recipes_training.megatron.model import MegatronModel, build_model
from recipes_training.megatron.plan import plan_megatron
from recipes_training.megatron.state import MegatronState
from recipes_training.megatron.step import MegatronStepper
from recipes_training.megatron.weights import export_model, fill_model
from recipes_training.plan import plan_device_type, plan_placement
from recipes_training.trainer import StepWatch
from recipes_training.weights.folder import check_weights
from resilience.comm.bindings import Bindings, Outlived
from resilience.faults.hooks import reach_in_backward


class MegatronTrainer:
    """One rank's part of a model; an instance of the distributed optimizer is a copy of the state.

    The parameters of the model follow from the optimizer's main parameters, which `settle` brings
    into them.
    """

    def __init__(self, job: TrainingJob, watch: StepWatch, *, is_restartable: bool) -> None:
        assert isinstance(job.trainer, MegatronSettings)
        self._job, self._settings = job, job.trainer
        self._watch = watch
        self._plan = plan_megatron(job, job.trainer)
        self._model: MegatronModel | None = None
        self._groups: list[ProcessGroup] = []
        self._group: WorkerGroup
        self.early_view = None
        self._bindings: Bindings
        self._outlived = Outlived()
        self._hooks: tuple[RemovableHandle, ...] = ()
        adapt(device_type=plan_device_type(job))
        if job.model.weights:
            check_weights(Path(job.model.weights), job.model)

    @property
    def num_parameters(self) -> int:
        """Return the number of trained values of the whole model."""
        return count_parameters(self._job.model)

    def take_groups(self, group: WorkerGroup) -> None:
        """Open Megatron's groups; build this rank's part the first time, and rebind ever after."""
        self._outlived.add(self._groups)
        self._group = group
        is_shared = group.device.type == "cpu"
        self._groups = open_groups(self._plan.parallel_state, is_shared=is_shared)
        if self._model is None:
            self._model = build_model(self._plan)
            roots = (self._model.chunk, self._model.optimizer, self._model.config)
            self._bindings = Bindings(self._groups, roots)
            self.stepper = MegatronStepper(
                self._model, self._plan, device=group.device, watch=self._watch
            )
        else:
            self._bindings.rebind(self._groups)
        self._hook_layers()
        placement = plan_placement(self._settings, group.layout, group.rank)
        known = getattr(self, "view", None)
        if known is None or known.replica != placement.replica:
            self.view = MegatronState(self._model, replica=placement.replica, shard=placement.shard)

    def _hook_layers(self) -> None:
        assert self._model is not None
        for hook in self._hooks:
            hook.remove()
        self._hooks = reach_in_backward(
            list(self._model.core.decoder.layers),
            places=self._watch.places,
            reach=self._watch.reach,
            is_reducing=lambda: self.stepper.is_last_micro_batch,
        )

    def fill(self) -> None:
        """Set parameters to what they are before the first step, and moments to zero."""
        assert self._model is not None
        fill_model(self._job, self._model)

    def discard(self) -> None:
        """Drop gradients, and what an aborted step has left in flight."""
        self.stepper.clear()

    def settle(self) -> None:
        """Bring the main parameters into the model, and those of the other ranks.

        With overlap_param_gather each layer asks for its own in the next forward pass.
        """
        self._settle(is_late=self._settings.overlap_param_gather)
        self._outlived.drop()

    def _settle(self, *, is_late: bool) -> None:
        assert self._model is not None
        with torch.no_grad():
            for part in self._model.parts:
                part._copy_main_params_to_model_params()  # noqa: SLF001
        groups = self._model.bucket_groups
        for number, group in enumerate(groups, 1):
            group.param_gather_handle = None
            group.param_gather_dispatched = False
            if number == len(groups):
                # What is gathered before it is that of this step by now, the last is not.
                self._watch.reach("settle")
            if not is_late:
                group.start_param_sync(force_sync=True)

    def export(self, folder: Path) -> None:
        """Write the weights in Hugging Face's layout."""
        assert self._model is not None
        self._settle(is_late=False)
        export_model(self._job, self._model, folder, group=self._group)
