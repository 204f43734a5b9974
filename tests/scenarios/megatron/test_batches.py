"""Runs of Megatron whose batches are made ahead: once for all ranks that read the same samples."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.job import Job
from tests.cases import slow
from tests.recipes_training.megatron.runs import NUM_STEPS, make_megatron_job
from tests.scenarios.mmap.test_mmap_runs import mmap
from tests.scenarios.recovery.runs import (
    FaultOutcome,
    check_same,
    finish,
    marked_processes,
    run_job,
    start_run,
)

Undisturbed = Callable[[Job], FaultOutcome]
PROGRAM = "tests.scenarios.megatron.reading"
FAULTS = (
    {"kind": "exception", "place": "backward", "step": 5, "rank": 0},
    {"kind": "sigkill", "place": "forward", "step": 9, "rank": 3},
)


def count_reads(folder: Path) -> dict[str, Counter[int]]:
    """Return by data rank how often each batch was made of the source."""
    return {
        path.name: Counter(map(int, path.read_text().split())) for path in sorted(folder.iterdir())
    }


@pytest.mark.parametrize(
    ("layout", "readers"),
    [
        slow("tensor", ["0of2", "1of2"], id="tensor"),
        slow("pipeline", ["0of2", "1of2"], id="pipeline"),
        slow("sharded", ["0of4", "1of4", "2of4", "3of4"], id="sharded"),
        slow("experts", ["0of4", "1of4", "2of4", "3of4"], id="experts"),
    ],
)
def test_a_position_is_read_once_for_all_ranks_that_want_it(
    tmp_path: Path, undisturbed: Undisturbed, layout: str, readers: list[str]
) -> None:
    reads, cache = tmp_path / "reads", tmp_path / "cache"
    reads.mkdir()
    job = make_megatron_job(layout, faults=FAULTS, mmap=mmap(cache))

    outcome = run_job(tmp_path / "run", job, module=PROGRAM, TEST_READS=str(reads))

    check_same(outcome, undisturbed(make_megatron_job(layout)), faults=FAULTS)
    found = count_reads(reads)
    assert list(found) == readers
    for counts in found.values():
        assert set(range(NUM_STEPS)) <= set(counts)
        assert set(counts.values()) == {1}
    (replaced,) = [each for each in outcome.named("batches_ready") if each.generation > 0]
    assert (replaced.rank, replaced.fields["num_batches"] > 0) == (3, True)
    assert list(cache.iterdir()) == []


@pytest.mark.slow
def test_a_producer_that_dies_is_replaced_by_one_for_all_ranks(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    reads, cache = tmp_path / "reads", tmp_path / "cache"
    reads.mkdir()
    job = make_megatron_job("tensor", mmap=mmap(cache), max_steps=40)

    with start_run(tmp_path / "run", job, module=PROGRAM, TEST_READS=str(reads)) as run:
        run.wait_for_step(4)
        killed = marked_processes(run.mark, "resilience.data.producer")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        outcome = finish(run)

    assert len(killed) == 2
    check_same(outcome, undisturbed(make_megatron_job("tensor", max_steps=40)))
    for counts in count_reads(reads).values():
        assert set(range(NUM_STEPS)) <= set(counts)
        # The one that was being made at the end is made again, and no other.
        assert sum(counts.values()) <= len(counts) + 1
