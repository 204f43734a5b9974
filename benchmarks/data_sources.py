"""The datasets of the benchmark of data, and the dataloaders that producers make of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resilience.data.sources import PositionBatchSampler, Start

Batch = dict[str, torch.Tensor]
SAMPLES_PER_BATCH = 8


class Counting(IterableDataset[Batch]):
    """Batches of the number that they have, at next to no cost; it has no end."""

    def __init__(self, num_tokens: int, first: int = 0) -> None:
        self.num_tokens = num_tokens
        self.first = first

    def __iter__(self) -> Iterator[Batch]:
        for number in itertools.count(self.first):
            yield {"tokens": torch.full((self.num_tokens,), number)}


class Numbered(Dataset[Batch]):
    """Samples that are found by their number."""

    def __init__(self, num_samples: int, num_tokens: int) -> None:
        self.num_samples = num_samples
        self.num_tokens = num_tokens

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Batch:
        return {"tokens": torch.full((self.num_tokens,), index)}


def counting(start: Start, num_tokens: int) -> DataLoader[Any]:
    """Return a loader of the trivial dataset."""
    return DataLoader(Counting(num_tokens, start.batch), batch_size=None)


def numbered(start: Start, num_samples: int, num_tokens: int) -> DataLoader[Any]:
    """Return a loader of a map-style dataset in a random order."""
    sampler = PositionBatchSampler(
        num_samples=num_samples,
        seed=1,
        samples_per_batch=SAMPLES_PER_BATCH,
        rank=start.rank,
        size=start.size,
        samples_consumed=start.samples_consumed,
    )
    return DataLoader(Numbered(num_samples, num_tokens), batch_sampler=sampler)
