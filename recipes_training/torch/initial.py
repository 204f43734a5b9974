"""Fills a torch model with the numbers that a run without given weights begins with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes_training.plan import shard_rows
from recipes_training.weights.draw import fill_rows


def fill_parameters(model: nn.Module, *, seed: int, std: float) -> None:
    """Set every parameter, or the shard of it that this worker holds, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            first_row = local_rows(parameter).start
            shape = tuple(parameter.shape)
            fill_rows(local_part(parameter), name, shape, first_row, seed=seed, std=std)


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a DTensor, sharing memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(parameter: Tensor) -> range:
    """Return which rows of a parameter this worker holds."""
    if not isinstance(parameter, DTensor):
        return range(parameter.shape[0])
    # The axis that shards is the mesh's last one, whatever comes before it.
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1
    rows = shard_rows(
        parameter.shape[0], num_shards=mesh.size(axis), shard=mesh.get_local_rank(axis)
    )
    assert len(rows) == parameter.to_local().shape[0]
    return rows
