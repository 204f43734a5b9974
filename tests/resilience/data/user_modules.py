"""Data modules as users write them, for the tests; producers import them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from resilience.data.sources import Start

NUM_VAL = 3


class Counted:
    """A loader whose batch n holds n, with a state."""

    def __init__(self, first: int, num_batches: int) -> None:
        self._next = first
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < self._num_batches:
            self._next += 1
            yield {"number": np.full(4, self._next - 1)}


class Resumable(Counted):
    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class UserModule:
    def __init__(self, folder: Path, loader: type[Counted], first: int, num_batches: int) -> None:
        self._folder = folder
        self._loader = loader
        self._first = first
        self._num_batches = num_batches
        self._is_set_up = False

    def prepare_data(self) -> None:
        (self._folder / "prepared").touch()

    def setup(self, stage: str) -> None:
        self._is_set_up = stage == "fit"

    def train_dataloader(self) -> Counted:
        assert self._is_set_up
        return self._loader(self._first, self._num_batches)

    def val_dataloader(self) -> Counted:
        assert self._is_set_up
        return Counted(self._first, NUM_VAL)


def from_zero(folder: str, num_batches: int = 1000) -> UserModule:
    return UserModule(Path(folder), Counted, 0, num_batches)


def with_state(folder: str, num_batches: int = 1000) -> UserModule:
    return UserModule(Path(folder), Resumable, 0, num_batches)


def from_start(start: Start, folder: str, num_batches: int = 1000) -> UserModule:
    with (Path(folder) / "starts").open("a") as file:
        file.write(f"{start.stage} {start.batch}\n")
    return UserModule(Path(folder), Counted, start.batch, num_batches)


def many_loaders(folder: str) -> Any:
    module = from_zero(folder)
    module.train_dataloader = lambda: [Counted(0, 1), Counted(0, 1)]  # type: ignore[method-assign]
    return module
