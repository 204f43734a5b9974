"""The numbers that a run without given weights begins with.

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
from torch import Tensor

from recipes_training.plan import classify_parameter
from recipes_training.weights.tensors import Part

BLOCK_SIZE = 1 << 20


def fill_rows(
    target: Tensor, name: str, shape: tuple[int, ...], first_row: int, *, seed: int, std: float
) -> None:
    """Set contiguous rows of a parameter to what they are before the first step, in place.

    `shape` is that of the whole parameter, `name` Hugging Face's.
    """
    kind = classify_parameter(name)
    if kind != "normal":
        target.fill_(1.0 if kind == "ones" else 0.0)
        return
    flat = target.view(-1)
    start = first_row * math.prod(shape[1:])
    for offset, values in normal_blocks(
        name, shape, seed=seed, start=start, stop=start + flat.numel()
    ):
        part = flat[offset : offset + len(values)]
        part.copy_(torch.from_numpy(values * np.float32(std)))


def draw_part(name: str, shape: tuple[int, ...], part: Part, *, seed: int, std: float) -> Tensor:
    """Return a part of what a parameter is before the first step; its rows are drawn whole."""
    rows = range(shape[0])[part[0]]
    drawn = torch.empty(len(rows), *shape[1:])
    fill_rows(drawn, name, shape, rows.start, seed=seed, std=std)
    every_row: Part = (slice(None),)
    return drawn[every_row + part[1:]]


def normal_blocks(
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
