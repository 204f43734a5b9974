"""What `clean` removes of runs on this machine, with real agents and daemons."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.clusters.local_nodes import find_strays
from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.lock import read_lock
from launcher.clusters.running.memory import SHARED_MEMORY, batch_folder, remove_memory
from launcher.job import Job
from launcher.job.lineage import name_run
from resilience.data.folder import open_cache, open_root
from tests.launcher import local_world
from tests.launcher.clusters.test_local_run_tiered import Run, running
from tests.launcher.command import TIMEOUT_S, launch
from tests.launcher.local_job import local_job
from tests.processes import command_of, descendants, kill_family, wait_for_end


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path) as started:
        started.wait_for_workers()
        yield started


def kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_nothing_is_left_of_a_run_of_which_everything_was_killed(run: Run) -> None:
    arenas = run.arenas()
    refused = launch("clean", str(run.folder), folder=run.folder)
    killed = kill_family(run.process.pid)
    run.process.wait()
    for pid in killed:
        wait_for_end(pid)
    kept = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert all(path.is_dir() for path in arenas)
    assert f"  left      {arenas[0]}, " in launch("status", str(run.folder), folder=run.folder).out

    cleaned = launch("clean", str(run.folder), folder=run.folder)

    assert refused.status == 2
    assert "is running; end it first" in refused.err
    assert (cleaned.status, cleaned.err) == (0, "")
    assert cleaned.out.splitlines() == [f"removed {path}" for path in arenas]
    assert not any(path.exists() for path in arenas)
    assert kept == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    again = launch("clean", str(run.folder), folder=run.folder)
    assert again.out == f"llama3-tiny-pretrain has left nothing beside {run.folder}\n"


def test_nothing_is_left_of_a_run_that_was_stopped(run: Run) -> None:
    arenas = run.arenas()
    started = {run.process.pid, *descendants(run.process.pid)}
    assert launch("cancel", str(run.folder), folder=run.folder).status == 0
    run.process.wait(TIMEOUT_S)
    for pid in started:
        wait_for_end(pid)
    assert all(path.is_dir() for path in arenas), "another start would go on from these"

    cleaned = launch("clean", str(run.folder), folder=run.folder)

    assert cleaned.out.splitlines() == [f"removed {path}" for path in arenas]
    assert not any(path.exists() for path in arenas)


def test_daemons_that_outlive_their_run_are_ended(run: Run) -> None:
    """Their lease would keep them for a minute, and the folder with them."""
    daemons = set(run.daemons())
    pids = {run.process.pid, *descendants(run.process.pid)}
    keepers = {pid for pid in pids if b"keeper.py" in command_of(pid)}
    assert len(keepers) == 2
    kill(keepers | {run.process.pid})
    run.process.wait()
    for pid in keepers:
        wait_for_end(pid)

    cleaned = launch("clean", str(run.folder), folder=run.folder)

    assert cleaned.status == 0, cleaned.err
    for pid in pids | daemons:
        wait_for_end(pid)
    assert not any(path.exists() for path in run.arenas())


def test_a_copy_of_a_runs_folder_ends_no_process_of_the_run(tmp_path: Path) -> None:
    """A copy has the run's lock, with its id, and no process holds the copy's lock."""
    local_world.prepare(tmp_path)
    try:
        live = local_world.start_run(tmp_path)
        copy = Path(shutil.copytree(live, tmp_path / "copy"))
        holder = read_lock(live)
        assert holder
        strays = find_strays(holder.run_id)

        cleaned = launch("clean", str(copy), folder=tmp_path)

        assert cleaned.out.endswith(f" has left nothing beside {copy}\n"), cleaned
        assert strays & find_strays(holder.run_id, run_dir=live), "the run goes on"
    finally:
        local_world.end_all(tmp_path)


@pytest.fixture
def job() -> Job:
    return local_job("resilience/mmap=default", "resources.shm_gib=1")


def test_batches_are_found_by_the_name_that_workers_give_them(tmp_path: Path, job: Job) -> None:
    run = RunFolder(path=tmp_path, job=job)

    assert batch_folder(run) == SHARED_MEMORY / f"{job.name}-{name_run(tmp_path)}"


def test_batches_go_unless_a_process_uses_them(tmp_path: Path, job: Job) -> None:
    run = RunFolder(path=tmp_path, job=job)
    folder = batch_folder(run)
    assert folder
    lease = open_root(folder, folder.name, keep_s=3600)
    try:
        open_cache(lease, "train-0of1-0123456789abcdef", "{}")

        assert remove_memory(run).left == (f"{folder}, which is in use or not of this run",)
        lease.close()

        assert remove_memory(run).removed == (str(folder),)
        assert not folder.exists()
    finally:
        lease.close()
        shutil.rmtree(folder, ignore_errors=True)
