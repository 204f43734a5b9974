"""What it costs to begin far into a map-style dataset, beside its begin.

    python -m benchmarks.data_resume PLAN

Each time the cache is empty, and a producer starts; how long that takes is most of it. The
source alone is opened in this process, to see what the position itself costs.
"""

from __future__ import annotations

import time

import torch

from benchmarks import data_figures as figures
from benchmarks.data_plan import (
    BATCH_BYTES,
    Plan,
    check,
    fresh_folder,
    make_settings,
    make_source,
    open_loader,
    run_row,
    touch,
)
from benchmarks.data_sources import SAMPLES_PER_BATCH, Batch, numbered
from resilience.data.sources import Start

NUM_TOKENS = BATCH_BYTES // 8 // SAMPLES_PER_BATCH
"""Of a sample."""


def measure(plan: Plan) -> figures.Measured:
    """Measure both in turns, after a lap that warms up."""
    places = (
        (0, figures.AT_0, figures.SOURCE_0),
        (plan.resume_sample, figures.AT_FAR, figures.SOURCE_FAR),
    )
    values: dict[str, list[float]] = {}
    for number in range(plan.laps + 1):
        for sample, name, source_name in places:
            first, elapsed_ms = time_first(plan, sample)
            alone, alone_ms = time_source(plan, sample)
            if not torch.equal(first["tokens"], alone["tokens"]):
                raise SystemExit(f"the batch at sample {sample} is not the source's")
            if number:
                values.setdefault(name, []).append(elapsed_ms)
                values.setdefault(source_name, []).append(alone_ms)
    return figures.Measured(values)


def time_first(plan: Plan, sample: int) -> tuple[Batch, float]:
    """Return the first batch from a sample on, and the milliseconds to it."""
    source = make_source("numbered", num_samples=num_samples(plan), num_tokens=NUM_TOKENS)
    place = {"samples_per_batch": SAMPLES_PER_BATCH, "samples_consumed": sample}
    with fresh_folder(plan) as folder:
        settings = make_settings(folder)
        began_s = time.perf_counter()
        with open_loader(settings, source, **place) as loader:
            batch = next(iter(loader))
            total = touch(batch)
            elapsed_ms = (time.perf_counter() - began_s) * 1000
            check(total, int(batch["tokens"][:, 0].sum()) * NUM_TOKENS)
            loader.close(is_over=True)
    return batch, elapsed_ms


def time_source(plan: Plan, sample: int) -> tuple[Batch, float]:
    """Return the same batch from the source, and the milliseconds to it."""
    start = Start(
        batch=sample // SAMPLES_PER_BATCH, samples_consumed=sample, rank=0, size=1, stage="train"
    )
    began_s = time.perf_counter()
    batch = next(iter(numbered(start, num_samples(plan), NUM_TOKENS)))
    return batch, (time.perf_counter() - began_s) * 1000


def num_samples(plan: Plan) -> int:
    """Return the size of a dataset that the sample is in the middle of."""
    return 2 * plan.resume_sample


if __name__ == "__main__":
    run_row(measure)
