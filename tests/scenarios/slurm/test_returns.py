"""Agents of a job on a real Slurm that are killed, and started again on their nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from resilience.events import Event, EventReader, read_events
from tests.launcher.command import launch
from tests.processes import command_of, wait_for_end
from tests.scenarios.membership.agents.real_world import pause
from tests.scenarios.recovery.runs import check_no_step_lost
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.jobs import ENDED, Slurm
from tests.scenarios.slurm.test_run import losses, weights

pytest.importorskip("torch", reason="a worker needs torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
NUM_NODES = 4
BATCH, SEQ_LENGTH, EPOCH_STEPS = 48, 16, 40
RECIPE = (
    "recipe=llama/llama3_tiny_pretrain",
    "resilience/checkpointless=default",
    "resources.shm_gib=1",
    "resilience.checkpointless.hang_deadline_s=30",
    "trainer.num_devices=1",
    f"trainer.global_batch_size={BATCH}",
    "trainer.log_every_n_steps=1",
)
RUN_S = 900.0


@dataclass
class Job:
    """A job whose agents are killed and started again."""

    slurm: Slurm
    run_dir: Path
    job_id: str

    def __post_init__(self) -> None:
        self._reader = EventReader(self.run_dir / "events.jsonl")
        self._events: list[Event] = []

    def agents(self) -> dict[str, int]:
        """Return the process of the agent on each node."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            if b"\0resilience.agent\0" in command_of(pid):
                variables = _variables(pid)
                if variables.get("SLURM_JOB_ID") == self.job_id:
                    found[variables["SLURMD_NODENAME"]] = pid
        return found

    def kill(self, node: str) -> Callable[[], subprocess.Popen[bytes]]:
        """Kill an agent; return what starts it again, as it was, in a step of its own."""
        pid = self.agents()[node]
        words = command_of(pid).decode().rstrip("\0").split("\0")
        ours = {key: value for key, value in _variables(pid).items() if "SLURM" not in key}
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        step = (
            f"--jobid={self.job_id}",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={node}",
            "--cpu-bind=none",
        )

        def start() -> subprocess.Popen[bytes]:
            with (self.run_dir / "logs" / f"again-{node}.log").open("ab") as log:
                return subprocess.Popen(
                    ["srun", *step, *words],
                    cwd=self.run_dir,
                    env={**ours, **self.slurm.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )

        return start

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        def has_come() -> bool:
            self._events += self._reader.read_new()
            return is_so()

        cluster.wait_until(has_come, what, RUN_S)

    def num_joined(self, node: str) -> int:
        return sum(each.fields["node"] == node for each in self.named("node_joined"))

    def wait_for_return(self, node: str, number: int) -> None:
        """Return when a node has joined more often than that, and the run steps on."""
        self.wait_until(lambda: self.num_joined(node) > number, f"{node} is back")
        self.wait_for_steps(3)

    def wait_for_steps(self, number: int) -> None:
        begun = len(self.named("step"))
        self.wait_until(lambda: len(self.named("step")) >= begun + number, "further steps")

    def named(self, event: str) -> list[Event]:
        return [each for each in self._events if each.event == event]


def _variables(pid: int) -> dict[str, str]:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return dict(each.split("=", 1) for each in words if "=" in each)
    return {}


def make_recipe(num_standby: int, max_steps: int) -> tuple[str, ...]:
    return (
        *RECIPE,
        f"trainer.max_steps={max_steps}",
        f"trainer.num_nodes={NUM_NODES - num_standby}",
        f"resilience.checkpointless.standby_nodes={num_standby}",
    )


def submit(slurm: Slurm, folder: Path, recipe: tuple[str, ...]) -> Job:
    """Submit a job, and return when it steps."""
    run_dir = folder / "there"
    there = launch(
        *recipe,
        "cluster=slurm",
        "action=submit",
        "cluster.rdzv_host=127.0.0.1",
        f"cluster.python={sys.executable}",
        f"run.dir={run_dir}",
        folder=folder,
    )
    assert there.status == 0, there.err
    job_id = json.loads((run_dir / "submitted.json").read_text())["job_id"]
    job = Job(slurm, run_dir, str(job_id))
    job.wait_for_steps(3)
    return job


@pytest.mark.parametrize("num_standby", [0, 1])
@pytest.mark.parametrize(("away_s", "kept"), [(0, 3), (1, 0), (20, 1)])
def test_each_agent_but_one_is_killed_and_started_again(
    slurm: Slurm, tmp_path: Path, num_standby: int, away_s: int, kept: int
) -> None:
    """With the last one that it has started, Slurm takes the job for ended."""
    # With a node to spare the run goes on meanwhile; else it waits.
    max_steps = 300 + 60 * away_s * num_standby
    recipe = make_recipe(num_standby, max_steps)
    job = submit(slurm, tmp_path, recipe)
    nodes = sorted(job.agents())
    with ExitStack() as stack:
        for node in nodes[:kept] + nodes[kept + 1 :]:
            number = job.num_joined(node)
            start = job.kill(node)
            pause(away_s)
            stack.callback(start().wait)
            job.wait_for_return(node, number)
        last = max(each.step or 0 for each in job.named("step"))
        cluster.wait_until(lambda: state(job) in ENDED, "the job has ended", RUN_S)

    check_bits(job, tmp_path, recipe)
    assert last < max_steps
    # Without a node to spare, one that was killed gives the job its status.
    assert state(job) == ("COMPLETED" if num_standby else "FAILED")
    events = read_events(job.run_dir / "events.jsonl")
    assert [each for each in events if each.event == "recovery_fallback"] == []
    check_no_step_lost(events)


def test_job_that_is_queued_again_goes_on_from_its_state(slurm: Slurm, tmp_path: Path) -> None:
    """All of its agents are killed, and started again as another attempt."""
    recipe = (
        *make_recipe(1, 400),
        f"data.max_bytes={SEQ_LENGTH * BATCH * EPOCH_STEPS}",
        f"data.seq_length={SEQ_LENGTH}",
    )
    job = submit(slurm, tmp_path, recipe)
    job.wait_until(
        lambda: any((each.step or 0) > 2 * EPOCH_STEPS for each in job.named("step")), "two epochs"
    )

    slurm.ask("scontrol", "requeue", job.job_id)
    cluster.wait_until(lambda: state(job) in ENDED, "the job has ended", RUN_S)

    check_bits(job, tmp_path, recipe)
    assert state(job) == "COMPLETED"
    events = read_events(job.run_dir / "events.jsonl")
    opened = [each.fields["number"] for each in events if each.event == "generation_opened"]
    # Slurm asks them to end before it kills them, so they know which number was the last one.
    assert len(opened) > 1
    assert opened == sorted(set(opened)), "a number was given twice"
    fallbacks = [each for each in events if each.event == "recovery_fallback"]
    later = [each for each in fallbacks if each.generation == opened[-1]]
    assert {each.fields["source"] for each in later} == {"ram"}
    # Being asked to end, they kept the step that all had come to.
    stopped = {each.step for each in events if each.event == "worker_stopped" and each.step}
    assert {each.step for each in later} == {step + 1 for step in stopped}
    assert min(stopped) >= 2 * EPOCH_STEPS


def state(job: Job) -> str:
    return job.slurm.field(job.job_id, "JobState")


def check_bits(job: Job, folder: Path, recipe: tuple[str, ...]) -> None:
    """Assert that the job has trained to the bits of the same recipe on this machine."""
    here = folder / "here"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "launcher", *recipe),
            *("cluster=local", "action=run", "oversubscribe=true", f"run.dir={here}"),
        ],
        cwd=folder,
        timeout=RUN_S,
        capture_output=True,
        text=True,
    )
    logs = "".join(path.read_text()[-3000:] for path in job.run_dir.rglob("*.log"))
    assert done.returncode == 0, done.stderr
    assert losses(job.run_dir) == losses(here), logs
    assert weights(job.run_dir) == weights(here) != {}, logs
