"""A small job whose nodes are scripts of the test's own."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console

from launcher.clusters.local_run import run_nodes
from launcher.job import Job
from tests.launcher.shipped import untiered_job

RECIPE = "llama/llama3_tiny_pretrain"


def local_job(*overrides: str) -> Job:
    return untiered_job(RECIPE, "local", overrides)


def write_run(folder: Path, *scripts: str, overrides: Sequence[str] = ()) -> Job:
    """Write a run's folder with a script for each node and return its job."""
    job = local_job(
        f"trainer.num_nodes={len(scripts)}",
        f"trainer.global_batch_size={len(scripts) * 8}",
        *overrides,
    )
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(job.to_json())
    for index, script in enumerate(scripts):
        (folder / f"node-{index}.sh").write_text(f'cd "$(dirname "$0")" || exit\n{script}\n')
    return job


def run_scripts(
    folder: Path, *scripts: str, overrides: Sequence[str] = (), grace_s: float = 30.0
) -> tuple[int, str]:
    """Run a script for each node; return the exit status and what the console got."""
    shown = StringIO()
    job = write_run(folder, *scripts, overrides=overrides)
    status = run_nodes(job, folder, Console(file=shown, width=200), grace_s)
    return status, shown.getvalue()
