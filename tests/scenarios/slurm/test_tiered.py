"""A job on a real Slurm with a checkpoint daemon beside each node's agent."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from resilience.events import Event, EventReader, read_events
from tests.scenarios.slurm.jobs import Slurm, submit_recipe

pytest.importorskip("torch", reason="a worker needs torch")
SHM = Path("/dev/shm")


def submit(folder: Path, *overrides: str) -> str:
    """Submit the small Llama with checkpoints in memory; return the job's id."""
    return submit_recipe(folder, "recipe=llama/llama3_tiny_tiered", *overrides)


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.rglob("*.log")))


def arenas(folder: Path) -> dict[str, Path]:
    """Return where each node's daemon of a job said that it keeps shards."""
    found = re.findall(r"memoryd \d+ of (\w+) is ready in (\S+):", logs(folder))
    return {node: Path(path) for node, path in found}


def wait_for_checkpoints(slurm: Slurm, run_dir: Path, number: int) -> None:
    slurm.wait_until(
        lambda: len(named(run_dir, "checkpoint_saved")) >= number, f"{number} checkpoints"
    )


def named(run_dir: Path, event: str) -> list[Event]:
    events = EventReader(run_dir / "events.jsonl").read_new()
    return [each for each in events if each.event == event]


@pytest.mark.slow
def test_daemons_run_beside_the_agents_and_leave_nothing_of_a_job_that_is_done(
    slurm: Slurm, tmp_path: Path
):
    run_dir = tmp_path / "run"
    job_id = submit(run_dir, "trainer.max_steps=30", "cluster.tls=true")

    state = slurm.wait_for_end(job_id)

    assert state == "COMPLETED", logs(run_dir)
    assert len(arenas(run_dir)) == 2, logs(run_dir)
    assert all(path.parent == SHM and not path.exists() for path in arenas(run_dir).values())
    assert (run_dir / "run.token").stat().st_mode & 0o777 == 0o600
    assert named(run_dir, "checkpoint_saved"), logs(run_dir)


@pytest.mark.slow
def test_job_that_is_cancelled_saves_its_last_step(slurm: Slurm, tmp_path: Path):
    """Slurm sends SIGTERM to the daemons at the same moment as to the agents."""
    run_dir = tmp_path / "run"
    job_id = submit(run_dir, "trainer.max_steps=5000")
    wait_for_checkpoints(slurm, run_dir, 1)

    slurm.ask("scancel", job_id)
    slurm.wait_for_end(job_id)

    events = read_events(run_dir / "events.jsonl")
    (stopped,) = {each.step for each in events if each.event == "worker_stopped" and each.step}
    saved = [each.step for each in events if each.event == "checkpoint_saved"]
    assert stopped is not None
    assert saved[-1] == stopped + 1, logs(run_dir)
    for path in arenas(run_dir).values():
        shutil.rmtree(path)
