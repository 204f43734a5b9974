"""Whether anything grows in a long run: files, memory, and what a batch costs.

    python -m benchmarks.data_long PLAN

A lap is cut into ten parts. Cost is compared between the first and the last, files and memory
between the second, when the first windows are full, and the last.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from pathlib import Path

from benchmarks import data_figures as figures
from benchmarks.data_memory import MIB, read_own
from benchmarks.data_plan import (
    NUM_TOKENS,
    Plan,
    check,
    expected_sum,
    find_producers,
    fresh_folder,
    make_settings,
    make_source,
    open_loader,
    run_row,
    touch,
)
from resilience.data import CachedLoader

NUM_PARTS = 10
LOOK_EVERY = 7
"""Batches between two looks at the folder; prime to the lengths of segments."""
CHECKPOINTS_PER_PART = 5


class Part:
    """What is seen in a part of the run."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.num_batches = 0
        self.num_files = 0
        self.num_bytes = 0
        self.own_bytes = 0

    def look(self, folder: Path) -> None:
        """Note the most files, and the most memory that they take."""
        sizes = []
        for path in folder.rglob("*"):
            try:
                sizes.append(path.lstat().st_blocks * 512)
            except FileNotFoundError:
                continue
        self.num_files = max(self.num_files, len(sizes))
        self.num_bytes = max(self.num_bytes, sum(sizes))


def measure(plan: Plan) -> figures.Measured:
    """Run the laps, each on an empty cache."""
    laps: dict[str, list[float]] = defaultdict(list)
    for _ in range(plan.laps):
        for name, value in run_lap(plan).items():
            laps[name].append(value)
    return figures.Measured(dict(laps))


def run_lap(plan: Plan) -> dict[str, float]:
    """Run once from the first batch to the last."""
    frequency = max(1, plan.num_steps // NUM_PARTS // CHECKPOINTS_PER_PART)
    with fresh_folder(plan) as folder:
        source = make_source("counting", num_tokens=NUM_TOKENS)
        settings = make_settings(folder, checkpoint_frequency=frequency)
        with open_loader(settings, source) as loader:
            loader.read(0)
            parts = [run_part(plan, number, loader, folder) for number in range(NUM_PARTS)]
            loader.close(is_over=True)
    first, early, late = parts[0], parts[1], parts[-1]
    return {
        figures.FIRST_COST: first.elapsed_s / first.num_batches * 1e6,
        figures.LAST_COST: late.elapsed_s / late.num_batches * 1e6,
        figures.FILES_EARLY: early.num_files,
        figures.FILES_LATE: late.num_files,
        figures.BYTES_EARLY: early.num_bytes / MIB,
        figures.BYTES_LATE: late.num_bytes / MIB,
        figures.OWN_EARLY: early.own_bytes / MIB,
        figures.OWN_LATE: late.own_bytes / MIB,
    }


def run_part(plan: Plan, number: int, loader: CachedLoader, folder: Path) -> Part:
    """Read the batches of a part; looking is not counted as time."""
    length = plan.num_steps // NUM_PARTS
    numbers = range(number * length, (number + 1) * length)
    part, total = Part(), 0
    for begin in range(numbers.start, numbers.stop, LOOK_EVERY):
        end = min(begin + LOOK_EVERY, numbers.stop)
        began_s = time.perf_counter()
        total += sum(touch(loader.read(each)) for each in range(begin, end))
        part.elapsed_s += time.perf_counter() - began_s
        part.num_batches += end - begin
        part.look(folder)
    check(total, expected_sum(numbers))
    gc.collect()
    part.own_bytes = sum(read_own(pid) for pid in (os.getpid(), *find_producers(plan)))
    return part


if __name__ == "__main__":
    run_row(measure)
