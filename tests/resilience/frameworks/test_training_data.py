"""Samples that two processes have made are told apart by their parts that are plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from resilience.frameworks import training_data


class Drawn(Dataset[Any]):
    """Samples with noise of torch, which is seeded, beside an object."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"image": object(), "noise": torch.randn(2), "label": index}


class ByPair(Drawn):
    def __getitem__(self, index: int) -> Any:
        epoch, number = index  # type: ignore[misc]
        return epoch, number


class Endless(IterableDataset[Any]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter(())


def rows(first: float, words: set[int] | None = None) -> list[Any]:
    array = np.arange(4000, dtype=np.float64)
    array[2000] += first
    return [{"array": array, "words": words, "text": b"a"}] * 3


class Opened(Drawn):
    """Opens its file at the first read, as datasets do that are read by workers."""

    file: object = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or object()
        return index


def test_samples_are_read_by_a_worker_where_the_loader_has_some() -> None:
    data = Opened()

    assert training_data._digest(data, has_workers=True) == training_data._digest(Opened())
    assert data.file is None


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        pytest.param(Drawn(), Drawn(), True, id="noise"),
        pytest.param(rows(0), rows(0), True, id="array"),
        pytest.param(rows(0), rows(1e-12), False, id="array-by-a-bit"),
        pytest.param(rows(0, {0, 8}), rows(0, {8, 0}), True, id="set-in-another-order"),
        pytest.param(rows(0), rows(0)[:2], False, id="length"),
        pytest.param([(object(), 1)], [(object(), 2)], False, id="label-of-an-object"),
        pytest.param(TensorDataset(torch.ones(2)), TensorDataset(torch.zeros(2)), False, id="0-d"),
        pytest.param(ByPair(), Drawn(), False, id="by-pair"),
    ],
)
def test_samples_have_one_digest_where_they_are_the_same(
    one: Any, other: Any, is_same: bool
) -> None:
    assert (training_data._digest(one) == training_data._digest(other)) is is_same


@pytest.mark.parametrize("data", [(), Endless(), iter(())])
def test_what_has_no_samples_by_number_is_not_compared(data: Any) -> None:
    assert training_data._digest(data) == 0
