"""Runs on this machine whose nodes do as a test says, started as a person starts them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from launcher.clusters.local_nodes import end_strays
from launcher.clusters.running.cluster import read_run_folder
from launcher.clusters.running.lock import read_lock
from launcher.job.lineage import checkpoints_namespace
from launcher.rundir import EVENTS_FILE, write_files
from resilience.events import EventLog
from tests.launcher.command import Ended, launch, put
from tests.launcher.shipped import rendered, shipped_job
from tests.resilience.tiered.store_places import Place, make_shard

# Stands in for the recipe's own: a node that ends with the number that it reads, as `told` has it.
NODE = """#!/usr/bin/env bash
{# job, node #}
run_dir=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
echo "2026-11-24 10:00:0{{ num_nodes }} {{ node }} is there"
trap 'echo "{{ node }} stops"; exit 5' TERM
while ! [ -e "$run_dir/told" ]; do sleep 0.05; done
echo "the reason"
exit "$(cat "$run_dir/told")"
"""
WORDS = ("recipe=llama/llama3_tiny_pretrain", "action=run", "run.detach=true")


def prepare(folder: Path, node: str = NODE) -> None:
    """Have the launcher take this script for a node's, when it is started in the folder."""
    put(folder / "templates" / "local" / "node.sh.j2", node)


def start_run(folder: Path, *words: str) -> Path:
    """Start a run in the background, and return its folder."""
    before = set((folder / "runs").glob("*"))
    ended = launch(*WORDS, *words, folder=folder)
    assert ended.status == 0, ended.err
    (run,) = set((folder / "runs").glob("*")) - before
    return run


def ended_run(folder: Path, *overrides: str, status: int = 0) -> Path:
    """Return what a run leaves that has ended with a status, though no process ever was one."""
    prepare(folder)
    job = shipped_job("llama/llama3_tiny_pretrain", "local", overrides)
    run = folder / "runs" / job.name
    write_files(run, rendered(job))
    with EventLog(run / EVENTS_FILE, node="launcher", rank=None, generation=0) as events:
        events.write("run_started", digest=job.digest(), num_nodes=job.trainer.num_nodes)
        events.write("run_finished", exit_status=status, reason="its nodes have ended")
    tell(run, status)
    return run


def tell(run: Path, status: int) -> None:
    """Have every node of a run end."""
    partial = run / "told.new"
    partial.write_text(str(status))
    partial.rename(run / "told")


def put_steps(run: Path, *numbers: int, of: int = 1, generation: int = 0) -> None:
    """Put a shard of each of these steps into a run's store."""
    job = read_run_folder(run).job
    namespace = checkpoints_namespace(job, run)
    store = Place("folder", {"folder": str(run / "checkpoints")}).open()
    for step in numbers:
        make_shard(step, step=step, generation=generation, namespace=namespace, num_shards=of).put(
            store
        )


def status_of(run: Path) -> Ended:
    return launch("status", str(run), folder=run.parent)


def launcher_of(run: Path) -> int:
    holder = read_lock(run)
    assert holder is not None
    assert holder.is_held
    return holder.pid


def end_all(folder: Path) -> None:
    """Leave no process of the runs below a folder."""
    for lock in (path for path in folder.rglob("launcher.lock") if path.is_file()):
        holder = read_lock(lock.parent)
        if holder is None:
            continue
        if holder.is_held:
            with suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGKILL)
        if holder.run_id:
            end_strays(holder.run_id)
