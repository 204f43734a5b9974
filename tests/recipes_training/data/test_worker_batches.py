"""Who reads a worker's batches: another process once it has them, and until then the worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes_training.data import worker_batches
from recipes_training.data.worker_batches import CachedBatches

CACHED, OWN = 100, 200


class Loader:
    """A cache that has batches from a step on; asked for others it fails, as one that waits."""

    def __init__(self) -> None:
        self.ready_from = 2
        self.asked: list[int] = []

    def is_ready(self, number: int) -> bool:
        self.asked.append(number)
        return number >= self.ready_from

    def read(self, number: int) -> dict[str, NDArray[np.int64]]:
        if number < self.ready_from:
            raise TimeoutError(number)
        return {"rows": np.full((1, 1, 2), CACHED + number)}


class Own:
    """The same batches, read in the worker."""

    def read(self, step: int) -> NDArray[np.int64]:
        return np.full((1, 1, 2), OWN + step)


def values(batches: Any, *steps: int) -> list[int]:
    return [int(batches.read(step)[0][0, 0]) for step in steps]


def test_a_worker_reads_itself_until_the_cache_has_one_and_never_thereafter() -> None:
    loader = Loader()
    batches = CachedBatches(loader, Own())  # type: ignore[arg-type]

    assert values(batches, 0, 1, 2, 3) == [OWN, OWN + 1, CACHED + 2, CACHED + 3]
    # Later nobody asks any more whether there is one: who reads waits for it.
    assert loader.asked == [0, 1, 2]
    with pytest.raises(TimeoutError):
        batches.read(1)


def test_at_the_begin_of_a_run_a_worker_waits_for_the_cache() -> None:
    loader = Loader()

    with pytest.raises(TimeoutError):
        CachedBatches(loader, None).read(0)  # type: ignore[arg-type]
    assert loader.asked == []


def test_a_cache_that_does_not_come_is_waited_for_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_batches, "_START_S", 0.0)
    batches = CachedBatches(Loader(), Own())  # type: ignore[arg-type]

    with pytest.raises(TimeoutError):
        batches.read(0)
