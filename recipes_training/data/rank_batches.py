"""A rank's part of each global batch, read as it is asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes_training.data.order import SampleOrder, Split
from recipes_training.data.tokens import Samples


class RankBatches:
    """Reads one rank's samples of any step."""

    def __init__(self, samples: Samples, *, seed: int, split: Split, rank: int) -> None:
        self._samples = samples
        self._order = SampleOrder(num_samples=samples.num_samples, seed=seed)
        self._split = split
        self._rank = rank

    def read(self, step: int) -> NDArray[np.int64]:
        """Return the tokens, shape (micro batches, samples of one, sequence + 1)."""
        micro_batches = self._split.micro_batches(self._rank)
        return np.stack([self._read_rows(step, number) for number in micro_batches])

    def _read_rows(self, step: int, micro_batch: int) -> NDArray[np.int64]:
        positions = self._split.positions(step=step, micro_batch=micro_batch)
        return self._samples.read(self._order.sample_at(position) for position in positions)
