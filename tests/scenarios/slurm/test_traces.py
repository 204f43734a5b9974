"""Runs on a real Slurm that are ended in every way, gone on with and branched from.

What each of them has trained to is what the same recipe trains to on this machine, undisturbed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launcher.command import launch
from tests.processes import kill_family, wait_for_end
from tests.scenarios.local_runs.histories import Trace, history, newest_stored
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.jobs import ENDED, Slurm, agents, slow_steps
from tests.scenarios.slurm.test_run import weights

pytest.importorskip("torch", reason="a worker needs torch")
NUM_STEPS = 280
"""Of 0.25 s: no act finds the run ended, though Slurm takes 30 s to see that a limit is over."""
NUM_ACTS = 3
SEEDS = range(5)
WAIT_S = 420.0
"""Slurm counts limits in minutes, and looks at them every 30 s."""
RECIPE = (
    "recipe=llama/llama3_tiny_checkpointless",
    f"trainer.max_steps={NUM_STEPS}",
    "trainer.num_nodes=2",
    "trainer.num_devices=1",
    "trainer.global_batch_size=8",
    "trainer.log_every_n_steps=1",
    "resilience/tiered=folder",
    "resilience.tiered.ram.every_n_steps=5",
    "resilience.tiered.store.every_n_steps=10",
    "resources.shm_gib=1",
)
ACTS = ("requeue", "limit", "cancel", "scancel", "kill", "branch")


def draw(seed: int) -> list[str]:
    """Return what is done to a run."""
    return random.Random(seed).sample(ACTS, NUM_ACTS)


@dataclass(kw_only=True)
class SlurmTrace(Trace):
    """A trace of jobs."""

    slurm: Slurm
    chance: random.Random

    @property
    def job_id(self) -> str:
        return str(json.loads((self.run / "submitted.json").read_text())["job_id"])

    def ask(self, *words: str) -> None:
        done = launch(*words, folder=self.folder)
        assert done.status == 0, f"{done.err}\n{self.describe()}"

    def start(self) -> None:
        self.ask(
            *RECIPE,
            "cluster=slurm",
            "action=submit",
            "run.name=run",
            slow_steps(NUM_STEPS, 0.25),
            "cluster.rdzv_host=127.0.0.1",
            "cluster.requeue_at_limit=true",
            "cluster.signal_before_end_s=60",
            f"cluster.python={sys.executable}",
            f"resilience.tiered.store.url=folder:{self.folder / 'store'}",
        )

    def newest_start(self) -> tuple[int, int]:
        return max((each["start"] for each in self.steps().values()), default=(-1, -1))

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something, or for the end of the job."""
        state = ""

        def has_come() -> bool:
            nonlocal state
            state = self.slurm.field(self.job_id, "JobState")
            return is_so() or state in ENDED

        cluster.wait_until(has_come, what, WAIT_S)
        assert is_so() or state == "COMPLETED", f"{state}\n{self.describe()}"

    def wait_for_steps(self) -> None:
        """Return when the run has taken some further steps."""
        wanted = max(self.steps(), default=-1) + self.chance.randrange(5, 40)
        self.wait_until(lambda: max(self.steps(), default=-1) >= wanted, f"step {wanted}")

    def wait_for_end(self) -> str:
        cluster.wait_until(
            lambda: self.slurm.field(self.job_id, "JobState") in ENDED, "an end", WAIT_S
        )
        return self.slurm.field(self.job_id, "JobState")

    def wait_for_another_start(self, begun: tuple[int, int]) -> None:
        self.wait_until(lambda: self.newest_start() > begun, "another start")

    def do(self, act: str) -> None:
        """End the run in one way, and return when it goes on, or has ended with all its steps."""
        begun, job_id = self.newest_start(), self.job_id
        self.told.append(f"{act} after step {max(self.steps(), default=-1)}")
        if act == "limit":
            self.slurm.ask("scontrol", "update", f"jobid={job_id}", "timelimit=1")
            self.wait_for_another_start(begun)
            self.slurm.run("scontrol", "update", f"jobid={job_id}", "timelimit=60")
        elif act == "requeue":
            self.slurm.ask("scontrol", "requeue", job_id)
            self.wait_for_another_start(begun)
        else:
            self._end(act, job_id)
            if act == "branch" and newest_stored(self.run):
                self.names.append(f"run-{len(self.names)}")
                self.ask("branch", self.names[-2], f"run.name={self.names[-1]}")
            else:
                self.ask("continue", self.names[-1])
            self.wait_for_another_start(begun)

    def _end(self, act: str, job_id: str) -> None:
        if act == "scancel":
            self.slurm.ask("scancel", job_id)
        elif act == "kill":
            ended = [each for agent in agents(job_id) for each in kill_family(agent)]
            for pid in ended:
                wait_for_end(pid)
        else:
            self.ask("cancel", self.names[-1])
        state = self.wait_for_end()
        assert state == ("FAILED" if act == "kill" else "CANCELLED"), self.describe()

    def describe(self) -> str:
        logs = [path.read_text()[-2000:] for path in sorted(self.run.rglob("*.log"))]
        return "\n".join([f"{self.names}: {self.told}", *logs])


def test_each_act_is_in_some_trace() -> None:
    assert {act for seed in SEEDS for act in draw(seed)} == set(ACTS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch(
        *RECIPE,
        "resilience.faults.injected=[]",
        "action=run",
        "run.name=run",
        "oversubscribe=true",
        f"resilience.tiered.store.url=folder:{folder / 'store'}",
        folder=folder,
    )
    assert done.status == 0, done.err
    return folder / "runs" / "run"


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", SEEDS)
def test_run_that_is_ended_and_gone_on_with_has_the_bits_of_one_that_is_not(
    slurm: Slurm, tmp_path: Path, undisturbed: Path, seed: int
) -> None:
    trace = SlurmTrace(folder=tmp_path, slurm=slurm, chance=random.Random(f"steps of {seed}"))
    trace.start()
    for act in draw(seed):
        trace.wait_for_steps()
        assert len(trace.steps()) < NUM_STEPS, trace.describe()
        trace.do(act)

    assert trace.wait_for_end() == "COMPLETED", trace.describe()
    wanted = history([undisturbed])
    assert len(wanted) == NUM_STEPS
    trace.assert_same(wanted)
    assert weights(trace.run) == weights(undisturbed) != {}
    for name in trace.names:
        trace.ask("clean", name)
