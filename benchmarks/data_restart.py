"""How long a new process waits for its first batch, of a dataset whose first one takes long.

    python -m benchmarks.data_restart PLAN [CASE]

Without a case it is the row, which starts a worker for every measurement: one that makes its
loader, reads some batches, says how long the first one took, and waits to be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch.utils.data import DataLoader

from benchmarks import data_figures as figures
from benchmarks.data_plan import (
    LIMIT_S,
    NUM_TOKENS,
    Plan,
    check,
    expected_sum,
    find_producers,
    make_settings,
    make_source,
    open_loader,
    read_plan,
    run_row,
    touch,
    wait_until,
    write_plan,
)
from benchmarks.data_sources import Batch, Counting

FIRST, NUM_READ = 16, 6
"""Where training is resumed, and how many batches a worker reads before it is killed."""
TORCH = "torch"

Opener = Callable[[], Iterator[Batch]]
"""Makes a loader and begins with it."""


def measure(plan: Plan) -> figures.Measured:
    """Fill a cache for each stage, and let workers begin again on it."""
    values: dict[str, list[float]] = {}
    for stage in figures.STAGES:
        time_worker(plan, stage)
    for _ in range(plan.laps):
        values.setdefault(figures.COLD, []).append(time_worker(plan, TORCH))
        for stage in figures.STAGES:
            name = figures.restart_name(stage, figures.WORKER_KILLED)
            values.setdefault(name, []).append(time_worker(plan, stage))
            kill_producers(plan)
            name = figures.restart_name(stage, figures.ALL_KILLED)
            values.setdefault(name, []).append(time_worker(plan, stage))
    kill_producers(plan)
    return figures.Measured(values)


def time_worker(plan: Plan, case: str) -> float:
    """Run a worker, kill it, and return how many milliseconds its first batch took."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.data_restart"]
    with subprocess.Popen([*command, write_plan(plan), case], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        try:
            line = worker.stdout.readline()
        finally:
            worker.kill()
    if not line:
        raise SystemExit(f"the worker of {case} ended before its first batch")
    return float(line)


def kill_producers(plan: Plan) -> None:
    """Kill them and wait for their end."""
    for pid in find_producers(plan):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: int(not find_producers(plan)), 1)


def run_worker(plan: Plan, case: str) -> None:
    """Be a worker."""
    torch.set_num_threads(1)
    first = FIRST if case == "train" else 0
    open_batches = torch_opener(plan) if case == TORCH else our_opener(plan, case)
    began_s = time.perf_counter()
    batches = open_batches()
    total = touch(next(batches))
    elapsed_ms = (time.perf_counter() - began_s) * 1000
    total += sum(touch(next(batches)) for _ in range(NUM_READ - 1))
    check(total, expected_sum(range(first, first + NUM_READ)))
    print(elapsed_ms, flush=True)
    signal.pause()


def torch_opener(plan: Plan) -> Opener:
    """Return what makes torch's loader."""
    dataset = Counting(NUM_TOKENS, first_s=plan.first_s)
    return lambda: iter(DataLoader(dataset, batch_size=None, num_workers=1))


def our_opener(plan: Plan, case: str) -> Opener:
    """Return what makes ours, for a stage."""
    stage: Literal["train", "val"] = "train" if case == "train" else "val"
    settings = make_settings(plan.folder / "cache", deadline_s=LIMIT_S)
    source = make_source("counting", num_tokens=NUM_TOKENS, first_s=plan.first_s)
    first = FIRST if stage == "train" else 0
    return lambda: iter(open_loader(settings, source, samples_consumed=first, stage=stage))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_worker(read_plan(sys.argv[1]), sys.argv[2])
    else:
        run_row(measure)
