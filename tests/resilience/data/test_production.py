"""What a producer keeps, with batches of any sizes: within its budget, in not too many files."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilience.data.format import file_bytes
from resilience.data.producer_segments import ProducerSegments
from resilience.data.production import Production
from resilience.data.sources import OpenSource, Start, make_source, open_source
from resilience.data.streams import Made, Streams
from resilience.data.window import WindowLimits
from resilience.data.wire import ProducerMessage

MIB = 1 << 20
LIMIT_S = 60.0


def vary(start: Start, *, seed: int) -> Iterator[dict[str, Any]]:
    """Yield batches of which one in twelve is larger than the others."""
    number = start.batch
    while True:
        is_large = random.Random(seed * 100_000 + number).random() < 0.08
        yield {"x": np.zeros(6_000 if is_large else 4_000, dtype=np.uint8)}
        number += 1


class WatchedSegments(ProducerSegments):
    """Notes the most that its files have taken."""

    most_bytes = 0

    def store(self, made: Made) -> int | None:
        serial = super().store(made)
        used = sum(each.stat().st_size for each in self._folder.glob("segment-*"))
        self.most_bytes = max(self.most_bytes, used)
        return serial


def make_segments(folder: Path, budget_bytes: int, lock: threading.RLock) -> WatchedSegments:
    return WatchedSegments(folder, bytes(32), sealer=None, budget_bytes=budget_bytes, lock=lock)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_batches_of_changing_sizes_stay_within_the_budget(tmp_path: Path, seed: int) -> None:
    """Everything is kept for a resume at the start, so the budget is used up all the time."""
    lock = threading.RLock()
    segments = make_segments(tmp_path, 2 * MIB, lock)

    def open_at(number: int) -> OpenSource:
        start = Start(batch=number, samples_consumed=number, rank=0, size=1, stage="train")
        return open_source(make_source(partial(vary, seed=seed)), start, None)

    production = Production(
        limits=WindowLimits(
            prefetch_length=20,
            lookback_length=2,
            checkpoint_frequency=None,
            budget_bytes=2 * MIB,
            is_validation=False,
        ),
        first=0,
        checkpoint=0,
        segments=segments,
        streams=Streams(open_at, keep_state=lambda _state: None, is_sealed=False),
        lock=lock,
    )
    answers: queue.SimpleQueue[ProducerMessage] = queue.SimpleQueue()
    thread = threading.Thread(target=production.run)
    thread.start()
    try:
        consumer = production.arrive(answers.put, 0)
        for number in range(3_000):
            production.ask(consumer, number)
            assert answers.get(timeout=LIMIT_S).verb == "published"
    finally:
        production.stop()
        thread.join(LIMIT_S)
        production.close()

    assert MIB < segments.most_bytes <= 2 * MIB


@pytest.mark.parametrize("budget_mib", [8, 256, 4096, 1 << 20])
@pytest.mark.parametrize("batch_bytes", [100, 2 << 10, 64 << 10, 1 * MIB])
def test_no_budget_is_spread_over_more_files_than_a_process_may_open(
    tmp_path: Path, budget_mib: int, batch_bytes: int
) -> None:
    segments = make_segments(tmp_path, budget_mib * MIB, threading.RLock())

    taken = segments.segment_bytes(batch_bytes)

    assert taken >= file_bytes(1, batch_bytes)
    # The largest segment there is has 64 MiB.
    assert budget_mib * MIB // taken <= max(512, budget_mib // 64)
