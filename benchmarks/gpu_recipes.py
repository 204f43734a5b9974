"""Recipes on one GPU, started by the launcher; part of `benchmarks.gpu`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faultbench import run_folder
from resilience.events import read_events

ROOT = Path(__file__).parents[1]
ONE_DEVICE = ROOT / "benchmarks" / "recovery_peers" / "one_device"
INSTANCES = {"cpu": "cpu", "cuda": "ml.g5.xlarge"}
"""To the launcher it says that there is one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRun:
    """What a run came to."""

    status: int
    losses: tuple[float, ...]
    """One a step, of those that counted."""
    num_faults: int
    """How many were detected; an exception of several ranks counts once for each."""
    digest: str
    """Of the weights that it has written; empty where there are none."""
    last_words: str


def run_recipe(device: str, recipe: str, *overrides: str, num_nodes: int = 1) -> RecipeRun:
    """Run a recipe with one worker on each of several nodes, all of them on this device."""
    with run_folder() as folder:
        run_dir = Path(folder, "run")
        words = [f"recipe={recipe}", f"instance={INSTANCES[device]}", f"run.dir={run_dir}"]
        words += [f"trainer.num_nodes={num_nodes}", "trainer.num_devices=1", *overrides]
        paths = [str(ROOT), *([str(ONE_DEVICE)] if num_nodes > 1 else [])]
        if known := os.environ.get("PYTHONPATH"):
            paths.append(known)
        ended = subprocess.run(
            [sys.executable, "-m", "launcher", "action=run", "oversubscribe=true", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return _read_run(run_dir, ended.returncode, ended.stdout.splitlines())


def _read_run(run_dir: Path, status: int, lines: Sequence[str]) -> RecipeRun:
    path = run_dir / "events.jsonl"
    events = read_events(path) if path.exists() else []
    steps = {int(each.step or 0): each.fields["loss"] for each in events if each.event == "step"}
    files = sorted(each for each in run_dir.glob("checkpoint/**/*") if each.is_file())
    content = b"".join(hashlib.sha256(each.read_bytes()).digest() for each in files)
    problems = [each.strip() for each in lines if "Error" in each]
    return RecipeRun(
        status=status,
        losses=tuple(steps[step] for step in sorted(steps)),
        num_faults=sum(each.event == "fault_detected" for each in events),
        digest=hashlib.sha256(content).hexdigest() if files else "",
        last_words=(problems or [each.strip() for each in lines] or ["no word"])[-1],
    )
