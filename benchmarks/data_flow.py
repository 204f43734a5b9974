"""How many batches of a trivial source come in a second: from the producer, and to a consumer.

    python -m benchmarks.data_flow PLAN

The producer alone is counted from outside while its only consumer rests; through a consumer,
which sums up every batch, it works beside DataLoaders that have a process more as well.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from torch.utils.data import DataLoader

from benchmarks import data_figures as figures
from benchmarks.data_plan import (
    NUM_TOKENS,
    Plan,
    check,
    count_published,
    expected_sum,
    fresh_folder,
    make_settings,
    make_source,
    open_loader,
    run_row,
    touch,
    wait_until,
)
from benchmarks.data_read import find_stateful
from benchmarks.data_sources import Batch, Counting

SOURCE = make_source("counting", num_tokens=NUM_TOKENS)
START = 10
"""The first tenth is not counted: processes start meanwhile."""


def measure(plan: Plan) -> figures.Measured:
    """Run all laps, each system once a lap, after one that warms up."""
    values: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    for number in range(plan.laps + 1):
        rates = {
            figures.MADE: count_made(plan),
            figures.OURS: count_ours(plan),
            figures.LOADER_1: count_loader(plan, DataLoader),
        }
        try:
            rates[figures.STATEFUL_1] = count_loader(plan, find_stateful())
        except ImportError:
            missing[figures.STATEFUL_1] = "left out: pip install torchdata"
        for name, rate in rates.items() if number else ():
            values.setdefault(name, []).append(rate)
    return figures.Measured(values, missing)


def count_made(plan: Plan) -> float:
    """Return the producer's rate while nobody takes anything."""
    first, last = plan.num_made // START, plan.num_made
    with fresh_folder(plan) as folder:
        settings = make_settings(folder, prefetch_length=plan.num_made, budget_mib=1024)
        with open_loader(settings, SOURCE) as loader:
            check(touch(loader.read(0)), 0)
            began, began_s = wait_until(lambda: count_published(folder), first)
            ended, ended_s = wait_until(lambda: count_published(folder), last)
            loader.close(is_over=True)
    return (ended - began) / (ended_s - began_s)


def count_ours(plan: Plan) -> float:
    """Return the rate of our consumer."""
    with fresh_folder(plan) as folder, open_loader(make_settings(folder), SOURCE) as loader:
        rate = walk(loader, plan)
        loader.close(is_over=True)
    return rate


def count_loader(plan: Plan, make: type[DataLoader[Batch]]) -> float:
    """Return the rate of a DataLoader with one worker."""
    return walk(make(Counting(NUM_TOKENS), batch_size=None, num_workers=1), plan)


def walk(batches: Iterable[Batch], plan: Plan) -> float:
    """Sum up all batches and return how many came in a second."""
    first = plan.num_made // START
    iterator = iter(batches)
    total = sum(touch(batch) for batch in itertools.islice(iterator, first))
    began_s = time.perf_counter()
    total += sum(touch(batch) for batch in itertools.islice(iterator, plan.num_made - first))
    elapsed_s = time.perf_counter() - began_s
    check(total, expected_sum(range(plan.num_made)))
    return (plan.num_made - first) / elapsed_s


if __name__ == "__main__":
    run_row(measure)
