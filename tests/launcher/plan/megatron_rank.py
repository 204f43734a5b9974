"""Rank 0 of Megatron in a world that is not there, as JSON: run as a program, a job's words a line.

A process of its own, because Megatron on a CPU changes torch for the whole process.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from types import SimpleNamespace
from typing import Any, cast

from recipes_training.megatron.cpu import stand_in

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
stand_in()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from launcher.job import Job  # noqa: E402
from recipes_training.megatron.step import _Batches  # noqa: E402
from recipes_training.megatron.trainer import MegatronTrainer  # noqa: E402
from recipes_training.plan import plan_copy  # noqa: E402
from tests.launcher.plan.worlds import job_of, world_of  # noqa: E402
from tests.recipes_training.groups import Quiet  # noqa: E402


def measure(job: Job, *, is_forward: bool) -> dict[str, int]:
    """Return the bytes that a rank holds, and those that a micro batch keeps if it is run."""
    trainer = job.trainer
    nodes = [f"node-{number}" for number in range(trainer.num_nodes)]
    layout = plan_copy(job, trainer.world_size).layout(nodes, trainer.num_devices)
    with world_of(job) as group:
        place = SimpleNamespace(**vars(group), layout=layout)
        rank = MegatronTrainer(job, Quiet(), is_restartable=False)
        rank.take_groups(cast("Any", place))
        assert rank._model is not None
        parameters = list(rank._model.core.parameters())
        state = [each.tensor.nbytes for each in rank.view.tensors()]
        return {
            "weights": sum(each.nbytes for each in parameters),
            "gradients": sum(each.main_grad.nbytes for each in parameters),
            "state": sum(state),
            "kept": _kept(job, rank, parameters) if is_forward else 0,
        }


def _kept(job: Job, rank: MegatronTrainer, parameters: list[Tensor]) -> int:
    """Return what is saved for the backward pass, weights left out."""
    assert rank._model is not None
    for each in parameters:
        each.data.normal_(std=0.02)
    weights = {each.untyped_storage().data_ptr() for each in parameters}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            saved[place] = tensor
        return tensor

    shape = (job.trainer.micro_batch_size, job.data.seq_length + 1)
    rows = [torch.randint(0, job.model.vocab_size, shape)]
    batches = _Batches(rows, rank.stepper, 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = batches.forward(iter(rows), rank._model.chunk)
    assert output
    return sum(each.untyped_storage().nbytes() for each in saved.values())


if __name__ == "__main__":
    for line in sys.stdin:
        forward, *words = json.loads(line)
        sys.stdout.write(json.dumps(measure(job_of(*words), is_forward=forward)) + "\n")
