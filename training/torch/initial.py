"""Fills a torch model with the numbers that a run without given weights begins with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.plan import classify_parameter, shard_rows
from training.weights.draw import normal_blocks


def fill_parameters(model: nn.Module, *, seed: int, std: float) -> None:
    """Set every parameter, or the shard of it that this worker holds, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = local_part(parameter)
            kind = classify_parameter(name)
            if kind != "normal":
                local.fill_(1.0 if kind == "ones" else 0.0)
                continue
            row_size = math.prod(parameter.shape[1:])
            rows = local_rows(parameter)
            start, stop = rows.start * row_size, rows.stop * row_size
            flat = local.view(-1)
            for offset, values in normal_blocks(
                name, tuple(parameter.shape), seed=seed, start=start, stop=stop
            ):
                part = flat[offset : offset + len(values)]
                part.copy_(torch.from_numpy(values * np.float32(std)))


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
