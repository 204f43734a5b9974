"""Jobs on a Slurm that runs: submit one, look at it, wait for its end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.clusters.slurm_submit import submit_slurm
from launcher.job import Job
from launcher.rundir import write_files
from tests.launcher.command import launch
from tests.launcher.shipped import rendered, untiered_job
from tests.processes import processes_with
from tests.scenarios.slurm import cluster

WAIT_S = 90
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@dataclass(frozen=True)
class Slurm:
    """The commands of a cluster that runs."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return cluster.environment(self.folder)

    def run(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )

    def ask(self, *command: str, folder: Path | None = None) -> str:
        done = self.run(*command, folder=folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def field(self, job_id: str, name: str) -> str:
        text = self.ask("scontrol", "show", "job", job_id)
        found = re.search(rf"^.*?\b{name}=(\S*)", text, re.MULTILINE)
        assert found, text
        return found[1]

    def wait_for_end(self, job_id: str) -> str:
        """Return the job's state once it has ended."""
        self.wait_until(lambda: self.field(job_id, "JobState") in ENDED, f"job {job_id} has ended")
        return self.field(job_id, "JobState")

    @staticmethod
    def wait_until(is_so: Callable[[], bool], what: str) -> None:
        cluster.wait_until(is_so, what, WAIT_S)


@dataclass(frozen=True)
class Run:
    """A job that was submitted, whose agents are stand-ins."""

    slurm: Slurm
    folder: Path
    job_id: str

    def wait_for(self, pattern: str, number: int) -> list[Path]:
        """Return the files of this pattern once there are so many."""
        self.slurm.wait_until(
            lambda: len(list(self.folder.glob(pattern))) >= number, f"{number} files {pattern}"
        )
        return sorted(self.folder.glob(pattern))

    def seen(self, number: int, restart: int = 0) -> list[dict[str, Any]]:
        """Return what each node's agent was started with."""
        paths = self.wait_for(f"seen-{restart}-*.json", number)
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> str:
        return self.slurm.wait_for_end(self.job_id)

    @property
    def exit_status(self) -> str:
        return self.slurm.field(self.job_id, "ExitCode").partition(":")[0]

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))


def submit_run(
    slurm: Slurm, folder: Path, values: dict[str, Any], prepare: Callable[[Path], None] = Path.mkdir
) -> Run:
    """Submit the tiny Llama with other values from a folder that `prepare` makes."""
    prepare(folder)
    job = slurm_job(values)
    write_files(folder, rendered(job))
    return Run(slurm, folder, submit_slurm(folder, job).job_id)


def submit_recipe(run_dir: Path, *words: str) -> str:
    """Submit a recipe with real agents and workers; return the number of its job."""
    real = ("cluster.rdzv_host=127.0.0.1", f"cluster.python={sys.executable}")
    return submit_words(run_dir.parent, run_dir, *words, *real)


def submit_words(folder: Path, run_dir: Path, *words: str) -> str:
    """Submit what a person types in a folder; return the number of its job."""
    mine = ("cluster=slurm", "action=submit", f"run.dir={run_dir}")
    done = launch(*words, *mine, folder=folder)
    assert done.status == 0, done.err
    return str(json.loads((run_dir / "submitted.json").read_text())["job_id"])


def train_here(run_dir: Path, *words: str) -> None:
    """Train a recipe on this machine, without Slurm."""
    mine = ("cluster=local", "action=run", "oversubscribe=true", f"run.dir={run_dir}")
    done = launch(*words, *mine, folder=run_dir.parent)
    assert done.status == 0, done.err


def stand_in(folder: Path) -> str:
    """Return a program that takes the place of python, and so of the node's agent."""
    path = folder / "python"
    if not path.exists():
        code = (Path(__file__).parent / "stand_in.py").read_text()
        path.write_text(f"#!{sys.executable}\n{code}")
        path.chmod(0o755)
    return str(path)


def slurm_job(values: dict[str, Any]) -> Job:
    """Return the tiny Llama's Slurm job with other values, which Hydra does not get to see."""
    job = untiered_job("llama/llama3_tiny_pretrain", "slurm")
    content = merge(job.model_dump(mode="json", by_alias=True), values)
    return Job.model_validate_json(json.dumps(content), strict=True)


def merge(content: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = dict(content)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def processes(job_id: str, node: str = "", word: str = "") -> list[int]:
    """Return every process that a node of the job has started, or any of its nodes."""
    marks = (f"SLURM_JOB_ID={job_id}", "SLURM_STEP_ID=0")
    return processes_with(*marks, *([f"SLURMD_NODENAME={node}"] if node else []), word=word)


def agents(job_id: str, node: str = "") -> list[int]:
    """Return the agents among these processes, which workers are forked from."""
    return processes(job_id, node, "\0resilience.agent\0")


def slow_steps(number: int, seconds: float) -> str:
    """Return an override by which the first steps of a run take their time on any machine."""
    slow = (f"{{kind:slow,place:forward,step:{n},rank:0,seconds:{seconds}}}" for n in range(number))
    return f"resilience.faults.injected=[{','.join(slow)}]"
