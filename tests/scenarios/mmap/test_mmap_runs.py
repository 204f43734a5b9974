"""Runs whose batches are made ahead in mapped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recipes_training.conftest import Reference
from tests.recipes_training.jobs import make_job
from tests.recipes_training.workers import Workers
from tests.scenarios.recovery.conftest import Undisturbed, undisturbed  # noqa: F401
from tests.scenarios.recovery.runs import finish, make_fault_job, run_job, start_run

NUM_STEPS = 24


def mmap(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "prefetch_length": 4,
        "val_prefetch_length": 1,
        "lookback_length": 2,
        "val_lookback_length": 0,
        "checkpoint_frequency": None,
        "budget_mib": 8,
        "keep_s": 600,
        "deadline_s": 60.0,
        "encryption": None,
        **changes,
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_has_the_bits_of_one_that_reads_its_data_itself(
    workers: Workers, reference: Reference, tmp_path: Path, num_workers: int
) -> None:
    trainer = {"num_devices": num_workers, "max_steps": 12}
    before = reference(make_job(trainer=trainer))
    cache = tmp_path / "cache"

    outcome = workers.run(
        make_job(trainer=trainer, resilience={"mmap": mmap(cache)}), tmp_path / "run"
    )

    assert outcome.losses == before.losses
    assert outcome.weights() == before.weights()
    assert len(outcome.named("batches_ready")) == num_workers
    assert list(cache.iterdir()) == []


def test_who_replaces_a_worker_finds_its_batches(
    tmp_path: Path,
    undisturbed: Undisturbed,  # noqa: F811
) -> None:
    faults = [
        {"kind": "exception", "place": "forward", "step": 8, "rank": 1},
        {"kind": "sigkill", "place": "backward", "step": 15, "rank": 2},
    ]
    before = undisturbed(max_steps=NUM_STEPS)
    cache = tmp_path / "cache"

    notes = tmp_path / "notes"
    job = make_fault_job(max_steps=NUM_STEPS, faults=faults, mmap=mmap(cache))
    outcome = run_job(
        tmp_path / "run", job, module="tests.scenarios.mmap.noting_batches", TEST_NOTES=str(notes)
    )

    assert outcome.statuses == [0]
    assert outcome.digests() == before.digests()
    # Whoever comes into a run that is under way keeps nobody waiting for a producer.
    assert notes.read_text().splitlines() == ["waits at step 0"] * 4 + ["reads at step 15"]
    ready = {(each.rank, each.generation): each for each in outcome.named("batches_ready")}
    # An exception leaves a worker its batches.
    assert sorted(rank for rank, generation in ready if generation == 0) == [0, 1, 2, 3]
    (replaced,) = [each for (_, generation), each in ready.items() if generation > 0]
    assert (replaced.rank, replaced.step) == (2, 15)
    assert replaced.fields["num_batches"] > 0
    assert list(cache.iterdir()) == []


def test_a_run_that_is_started_again_finds_its_batches(tmp_path: Path) -> None:
    """All of its processes were killed at once; it begins at the start, which was kept.

    The steps fill more than one segment of 64 batches.
    """
    cache = tmp_path / "cache"
    job = make_fault_job(max_steps=100, num_devices=2, mmap=mmap(cache))
    folder = tmp_path / "run"
    with start_run(folder, job) as run:
        run.wait_for_step(90)
        run.kill_node("n0")
    with start_run(folder, job) as run:
        outcome = finish(run)

    assert outcome.statuses == [0]
    ready = [each.fields["num_batches"] for each in outcome.named("batches_ready")]
    assert ready[:2] == [0, 0]
    assert min(ready[2:]) > 90
    assert list(cache.iterdir()) == []
