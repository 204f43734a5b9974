"""The state of a run without recovery, as its checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from launcher.job import Job
from launcher.job.workload import TorchTrainer
from resilience.state.torch_state import TorchState, materialise, refuse_unshared
from resilience.state.view import NamedTensor
from training.group import WorkerGroup
from training.plan import plan_placement
from training.torch_trainer.checkpoints import Progress
from training.torch_trainer.model import fill_core


def open_state(
    job: Job, core: nn.Module, optimizer: Optimizer, group: WorkerGroup, *, progress: Progress
) -> PlainState:
    """Return a view of a worker's state, all of whose tensors exist then."""
    refuse_unshared(core)
    materialise(optimizer)
    return PlainState(job, core, optimizer, progress, rank=group.environment.rank)


class PlainState:
    """A StateView whose rest has the form that a run with recovery gives it."""

    def __init__(
        self, job: Job, core: nn.Module, optimizer: Optimizer, progress: Progress, *, rank: int
    ) -> None:
        assert isinstance(job.trainer, TorchTrainer)
        self._job = job
        self._core = core
        self._optimizer = optimizer
        self._progress = progress
        self.replica, self.shard = plan_placement(job.trainer, rank)
        self.state = TorchState(core, optimizer, replica=self.replica, shard=self.shard)

    def tensors(self) -> Sequence[NamedTensor]:
        """Return the tensors of model and optimizer."""
        return self.state.tensors()

    def read_rest(self) -> Mapping[str, Any]:
        """Return the small rest, that of the run's progress included."""
        return {"view": self.state.read_rest(), "recovery": self._progress.rest}

    def write_rest(self, rest: Mapping[str, Any]) -> None:
        """Take over what `read_rest` returned."""
        self.state.write_rest(rest["view"])
        self._progress.rest = dict(rest["recovery"])

    def make_first(self) -> None:
        """Make the state before the first step again, whatever a broken load has left."""
        fill_core(self._job, self._core)
        for moments in self._optimizer.state.values():
            for tensor in moments.values():
                tensor.zero_()
