"""Jobs that a real Slurm's time limit ends, and that go on in their next start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilience.event_files import event_files
from resilience.events import read_events
from tests.launcher.shipped import shipped_job
from tests.scenarios.slurm.cluster import wait_until
from tests.scenarios.slurm.jobs import Run, Slurm
from tests.scenarios.slurm.test_tiered import arenas, logs
from tests.scenarios.slurm.test_tiered import submit as submit_tiered

QUEUED_AGAIN = "job.sbatch: the time limit ended the job; it is queued again"
WAIT_S = 420
"""Slurm counts limits in minutes, and looks at them every 30 s."""
Losses = list[tuple[int, Any]]


def starts(run_dir: Path) -> list[Losses]:
    """Return the steps of each start of a job, with their losses."""
    found: list[Losses] = []
    path = run_dir / "events.jsonl"
    for each in read_events(path) if event_files(path) else []:
        if each.event == "worker_started" and each.rank == 0:
            found.append([])
        elif each.event == "step" and each.step is not None:
            found[-1].append((each.step, each.fields["loss"]))
    return found


def train_until(slurm: Slurm, run_dir: Path, is_far: Callable[[], bool], *overrides: str) -> None:
    """Submit a job that would train for long, and cancel it when it has come so far."""
    job_id = submit_tiered(run_dir, "trainer.max_steps=100000", *overrides)
    wait_until(is_far, "the job has come so far", WAIT_S)
    slurm.ask("scancel", job_id)
    slurm.wait_for_end(job_id)
    for path in arenas(run_dir).values():
        shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_chain_of_starts_is_one_run(slurm: Slurm, tmp_path: Path):
    pytest.importorskip("torch", reason="a worker needs torch")
    chain, undisturbed = tmp_path / "chain", tmp_path / "undisturbed"
    limit = ('time_limit="00:03:00"', "cluster.signal_before_end_s=60",
             "cluster.requeue_at_limit=true")  # fmt: skip

    train_until(slurm, chain, lambda: len(starts(chain)) > 1 and len(starts(chain)[1]) > 9, *limit)

    first, second, *_ = starts(chain)
    assert logs(chain).count(QUEUED_AGAIN) == 1
    assert first[0][0] == 0
    # The last committed step was kept, and is told once more.
    assert second[0] == first[-1]
    both = first + second[1:]
    num_steps = len(both)
    train_until(slurm, undisturbed, lambda: sum(map(len, starts(undisturbed))) >= num_steps)
    (whole,) = starts(undisturbed)
    assert both == whole[:num_steps]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_job_whose_agents_outlast_the_limit_goes_on_as_well(
    slurm: Slurm, submit: Callable[..., Run]
):
    settings = shipped_job("llama/llama3_tiny_tiered", "slurm").resilience.tiered
    assert settings

    run = submit(
        does="outlast the limit",
        time_limit="00:01:00",
        cluster={"requeue_at_limit": True},
        resilience={"tiered": settings.model_dump(mode="json")},
    )

    wait_until(lambda: bool(list(run.folder.glob("seen-1-*"))), "a second start", WAIT_S)
    assert run.end() == "COMPLETED"
    assert QUEUED_AGAIN in run.log()
