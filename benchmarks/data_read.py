"""What a batch costs a consumer that is there already, beside a slice of a numpy memmap.

    python -m benchmarks.data_read PLAN

All laps walk over the same number of batches, each with other memory, and sum up every batch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks import data_figures as figures
from benchmarks.data_plan import (
    NUM_TOKENS,
    Plan,
    check,
    expected_sum,
    fresh_folder,
    make_settings,
    make_source,
    open_loader,
    run_row,
    touch,
)
from benchmarks.data_sources import Batch, Counting
from resilience.data import CachedLoader

SETTINGS: Mapping[str, Mapping[str, int]] = {
    figures.OURS: {},
    figures.OURS_LONG: {"prefetch_length": 64},
}
"""Beyond the defaults of recipes; the prefetch decides how often the producer is spoken to."""
WARM_BATCHES = 16
"""Of a DataLoader, before its lap begins."""

Lap = Callable[[], float]
"""Returns microseconds a batch."""


def measure(plan: Plan) -> figures.Measured:
    """Run all laps, each system once a lap."""
    laps, missing = make_laps(plan)
    with fresh_folder(plan) as folder, contextlib.ExitStack() as stack:
        for name, changes in SETTINGS.items():
            # All of them stay, as they may be needed again until the second checkpoint after.
            settings = make_settings(folder / name, checkpoint_frequency=plan.num_read, **changes)
            loader = open_loader(settings, make_source("counting", num_tokens=NUM_TOKENS))
            stack.callback(loader.close, is_over=True)
            for number in range(plan.num_read):
                touch(loader.read(number))
            laps[name] = functools.partial(walk_ours, plan, loader)
        values = run_laps(plan, laps)
    return figures.Measured(values, missing)


def make_laps(plan: Plan) -> tuple[dict[str, Lap], dict[str, str]]:
    """Return what ours is measured beside, and why some of it is missing."""
    memory = write_memmap(plan)
    laps: dict[str, Lap] = {
        figures.SLICE: lambda: walk_memory(memory, lambda part: int(torch.from_numpy(part).sum())),
        figures.ARRAY: lambda: walk_memory(memory, lambda part: int(part.sum())),
    }
    for num_workers, name in enumerate((figures.LOADER_0, figures.LOADER_1)):
        laps[name] = loader_lap(plan, DataLoader, num_workers)
    names = (figures.STATEFUL_0, figures.STATEFUL_1)
    try:
        stateful = find_stateful()
    except ImportError:
        return laps, dict.fromkeys(names, "left out: pip install torchdata")
    for num_workers, name in enumerate(names):
        laps[name] = loader_lap(plan, stateful, num_workers)
    return laps, {}


def find_stateful() -> type[DataLoader[Batch]]:
    """Return torchdata's loader; raises ImportError where it is not installed."""
    module = importlib.import_module("torchdata.stateful_dataloader")
    found: type[DataLoader[Batch]] = module.StatefulDataLoader
    return found


def run_laps(plan: Plan, laps: dict[str, Lap]) -> dict[str, list[float]]:
    """Run each once to warm up, then lap by lap."""
    values: dict[str, list[float]] = {name: [] for name in laps}
    for number, (name, lap) in itertools.product(range(plan.laps + 1), laps.items()):
        value = lap()
        if number:
            values[name].append(value)
    return values


def write_memmap(plan: Plan) -> np.memmap[tuple[int, int], np.dtype[np.int64]]:
    """Return the same batches as one array in a file that is mapped."""
    path, shape = plan.folder / "batches", (plan.num_read, NUM_TOKENS)
    written = np.memmap(path, np.int64, "w+", shape=shape)
    written[:] = np.arange(plan.num_read)[:, None]
    return open_memmap(path, shape)


def open_memmap(
    path: Path, shape: tuple[int, int]
) -> np.memmap[tuple[int, int], np.dtype[np.int64]]:
    """Map as our loader does: torch wants memory that can be written to."""
    return np.memmap(path, np.int64, "c", shape=shape)


def walk_memory(
    memory: np.memmap[tuple[int, int], np.dtype[np.int64]], sum_up: Callable[..., int]
) -> float:
    """Touch all slices."""
    total, began_s = 0, time.perf_counter()
    for number in range(len(memory)):
        total += sum_up(memory[number])
    return finish(total, len(memory), began_s)


def walk_ours(plan: Plan, loader: CachedLoader) -> float:
    """Touch all batches from the first on."""
    loader.load_state_dict({"samples_consumed": 0, "source_state": None})
    began_s = time.perf_counter()
    return walk(loader, plan.num_read, began_s)


def walk(batches: Iterable[Batch], count: int, began_s: float) -> float:
    """Touch so many batches."""
    total = sum(touch(batch) for batch in itertools.islice(batches, count))
    return finish(total, count, began_s)


def finish(total: int, count: int, began_s: float) -> float:
    """Return microseconds a batch."""
    elapsed_s = time.perf_counter() - began_s
    check(total, expected_sum(range(count)))
    return elapsed_s / count * 1e6


def loader_lap(plan: Plan, make: type[DataLoader[Batch]], num_workers: int) -> Lap:
    """Return a lap of a loader that makes its batches at that time, as its kind does."""

    def lap() -> float:
        batches = iter(make(Counting(NUM_TOKENS), batch_size=None, num_workers=num_workers))
        warm = sum(touch(batch) for batch in itertools.islice(batches, WARM_BATCHES))
        began_s = time.perf_counter()
        total = sum(touch(batch) for batch in itertools.islice(batches, plan.num_read))
        elapsed_s = time.perf_counter() - began_s
        check(warm + total, expected_sum(range(WARM_BATCHES + plan.num_read)))
        return elapsed_s / plan.num_read * 1e6

    return lap


if __name__ == "__main__":
    run_row(measure)
