"""Where weights begin: drawn numbers, or a local folder.

A parameter's first values are a function of (seed, name, shape) alone. They are
drawn in blocks of fixed size, each from a generator of its own, so a worker
draws only the blocks that its shard overlaps and any sharding begins alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.plan import classify_parameter, shard_rows

BLOCK_SIZE = 1 << 20


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
            for offset, values in _normal_blocks(
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


def _normal_blocks(
    name: str, shape: tuple[int, ...], *, seed: int, start: int, stop: int
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (offset from `start`, values) until `stop`, by flat index."""
    size = math.prod(shape)
    position = start
    while position < stop:
        block = position // BLOCK_SIZE
        first = block * BLOCK_SIZE
        values = _draw_block(name, shape, seed, block, min(BLOCK_SIZE, size - first))
        values = values[position - first : stop - first]
        yield position - start, values
        position += len(values)


def _draw_block(
    name: str, shape: tuple[int, ...], seed: int, block: int, length: int
) -> NDArray[np.float32]:
    text = f"{seed}/{name}/{shape}/{block}".encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.standard_normal(length, dtype=np.float32)
