"""What is left of a Slurm job's checkpoints when its daemons and an agent are killed."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from resilience.events import Event, read_events
from resilience.tiered.client import StepOnOffer, TieredClient
from resilience.tiered.errors import LostError
from resilience.tiered.loader import whole_steps
from resilience.tiered.memoryd.local import SOCKET_NAME
from resilience.tiered.shard import content_digest, is_intact, num_pieces
from resilience.tiered.status import ask_daemon, wait_for_daemon
from tests.launcher.command import launch
from tests.processes import command_of, parents, sent
from tests.resilience.tiered.daemons import LIMIT_S, Daemon
from tests.resilience.tiered.kept import wait_until
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.jobs import ENDED, Slurm
from tests.scenarios.slurm.test_recovery import agent_of
from tests.scenarios.slurm.test_run import losses, weights
from tests.scenarios.slurm.test_tiered import arenas, logs

pytest.importorskip("torch", reason="a worker needs torch")
NAMESPACE = "tiny"
NUM_KILLS = 20
MAX_STEPS = 400
"""More than are trained until the last kill."""
RUN_S = 600
"""What takes longer hangs."""
RECIPE = (
    "recipe=llama/llama3_tiny_tiered",
    "trainer.num_nodes=3",
    "trainer.num_devices=1",
    "trainer.global_batch_size=48",
    f"trainer.max_steps={MAX_STEPS}",
    "trainer.log_every_n_steps=1",
    "resilience.checkpointless.hang_deadline_s=30",
    "resilience/tiered=ram_s3",
    f"resilience.tiered.namespace={NAMESPACE}",
    "resilience.tiered.lease_s=20",
    "resilience.tiered.ram.every_n_steps=5",
    "resilience.tiered.ram.keep=2",
    "resilience.tiered.store.every_n_steps=5",
    "resilience.tiered.store.waiting_max=100",
)


@dataclass
class Digests:
    """What was read of each shard, which has to be the same wherever it came from."""

    known: dict[tuple[int, str], str] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)

    def read(self, client: TieredClient, step: StepOnOffer) -> None:
        """Read a step to its last byte; KeyError where newer ones have taken its place."""
        assert step.shards
        for shard in step.shards:
            with client.read(
                step=step.step, generation=step.generation, shard=shard, timeout_s=LIMIT_S
            ) as loan:
                pieces = range(num_pieces(loan.meta.num_bytes))
                assert all(is_intact(loan.memory, loan.meta, each) for each in pieces)
                digest = content_digest(loan.meta)
                self.sources.add(loan.source)
            assert self.known.setdefault((step.step, shard), digest) == digest


@dataclass
class Job:
    """A job whose daemons are killed."""

    run_dir: Path
    rng: random.Random
    digests: Digests = field(default_factory=Digests)
    newest: int = 0
    """The newest step that any daemon's `status` has called complete."""
    owner: str = ""
    """Whose the namespace is, as `status` says."""

    @property
    def token(self) -> str:
        return (self.run_dir / "run.token").read_text().strip()

    def reply(self, arena: Path) -> dict[str, Any]:
        reply: dict[str, Any] = ask_daemon(arena, token=self.token).reply
        return reply

    def look(self, arena: Path) -> int:
        """Return the newest step that a daemon calls complete, and remember it."""
        jobs = self.reply(arena)["jobs"]
        if NAMESPACE not in jobs:
            return 0
        self.owner = jobs[NAMESPACE]["job"]
        steps = [each["step"] for each in jobs[NAMESPACE]["steps"] if each["is_complete"]]
        self.newest = max([self.newest, *steps])
        return max(steps, default=0)

    def client(self, folder: Path, token: str = "") -> TieredClient:
        """Return a client of the job's namespace in the daemon of a folder."""
        return TieredClient(folder / SOCKET_NAME, token=token, namespace=NAMESPACE, job=self.owner)

    def kill(self, arena: Path) -> None:
        """Kill a daemon at a random moment, also while it drains, and wait for the next one."""
        file = os.pidfd_open(self.reply(arena)["pid"])
        after_s = 0.5 * self.rng.random()
        signals = [(after_s, signal.SIGKILL)]
        if self.rng.random() < 0.4:
            signals = [
                (after_s, signal.SIGINT),
                (after_s + 0.05 * self.rng.random(), signal.SIGKILL),
            ]
        with sent(file, signals):
            while not select.select([file], [], [], 0.05)[0]:
                with suppress(LostError):
                    self.look(arena)
        os.close(file)
        wait_for_daemon(arena, timeout_s=LIMIT_S, token=self.token)

    def check(self, arena: Path, reader: Daemon) -> None:
        """Read the newest complete step in the daemon that is new, and in the store alone."""
        seen = self.newest
        with self.client(arena, self.token) as client:
            wait_until(lambda: self.reads(client, seen))
        with self.client(reader.folder) as client:
            wait_until(lambda: self.reads(client, seen))

    def steps_in(self, reader: Daemon) -> set[int]:
        """Read every step of a store, and return which there are."""
        with self.client(reader.folder) as client:
            steps = whole_steps(client)
            for each in steps:
                self.digests.read(client, each)
        return {each.step for each in steps}

    def reads(self, client: TieredClient, least: int) -> bool:
        """Return whether the newest step that is whole could be read, and is not an older one."""
        newest = next(iter(whole_steps(client)), None)
        if newest is None or newest.step < least:
            return False
        with suppress(KeyError):
            self.digests.read(client, newest)
            return True
        return False


def open_store(folder: Path, store: Path) -> Daemon:
    """Start a daemon that has nothing but a store."""
    return Daemon(folder=folder, options=("--store", f"folder:{store}")).start()


def submit(folder: Path, store: Path) -> str:
    done = launch(
        *RECIPE,
        "cluster=slurm",
        "action=submit",
        "resilience.checkpointless.standby_nodes=1",
        "cluster.rdzv_host=127.0.0.1",
        f"cluster.python={sys.executable}",
        f"resilience.tiered.store.url=folder:{store}",
        f"run.dir={folder}",
        folder=folder.parent,
    )
    assert done.status == 0, done.err
    return str(json.loads((folder / "submitted.json").read_text())["job_id"])


def lose_agent(slurm: Slurm, run_dir: Path, job_id: str) -> str:
    """Kill the agent of a node that has a worker; return the node when the run goes on."""
    lost = max(each.node for each in named(run_dir, "worker_started"))
    before = len(named(run_dir, "generation_opened"))
    os.kill(agent_of(job_id, lost), signal.SIGKILL)
    slurm.wait_until(lambda: len(named(run_dir, "generation_opened")) > before, "a node less")
    return lost


def state_of(slurm: Slurm, job_id: str) -> str:
    return slurm.field(job_id, "JobState")


def named(run_dir: Path, event: str) -> list[Event]:
    return [each for each in read_events(run_dir / "events.jsonl") if each.event == event]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_newest_complete_step_outlives_every_kill(slurm: Slurm, tmp_path: Path) -> None:
    """From memory and from the store, with the digest of a run in which nobody was killed."""
    options = ("cluster=local", "action=run", f"run.dir={tmp_path}/here")
    url = f"resilience.tiered.store.url=folder:{tmp_path}/store-here"
    command = (sys.executable, "-m", "launcher", *RECIPE, *options, url)
    here = subprocess.run(command, cwd=tmp_path, timeout=RUN_S, capture_output=True, text=True)
    assert here.returncode == 0, here.stderr
    run_dir, store = tmp_path / "there", tmp_path / "store"
    job_id = submit(run_dir, store)
    job = Job(run_dir, random.Random(21))
    slurm.wait_until(lambda: len(arenas(run_dir)) == 4, "four daemons")
    alive = arenas(run_dir)
    slurm.wait_until(lambda: any(map(job.look, alive.values())), "a checkpoint")

    with open_store(tmp_path / "reader", store) as reader:
        for number in range(NUM_KILLS):
            if number == NUM_KILLS // 2:
                lost = alive.pop(lose_agent(slurm, run_dir, job_id))
            arena = alive[job.rng.choice(sorted(alive))]
            job.kill(arena)
            job.check(arena, reader)
        last = max(each.step or 0 for each in named(run_dir, "step"))
        cluster.wait_until(lambda: state_of(slurm, job_id) in ENDED, "the job has ended", RUN_S)
        ends = job.steps_in(reader)
        with open_store(tmp_path / "reader-here", tmp_path / "store-here") as undisturbed:
            job.steps_in(undisturbed)  # asserts that each step has the digest that it had there

    assert state_of(slurm, job_id) == "COMPLETED", logs(run_dir)
    assert last < MAX_STEPS
    assert {"ram"} < job.digests.sources
    failed = {each.step or 0 for each in named(run_dir, "checkpoint_failed")}
    assert set(range(5, MAX_STEPS + 1, 5)) - failed <= ends
    assert max(failed) <= last
    assert losses(run_dir) == losses(tmp_path / "here") != {}
    assert weights(run_dir) == weights(tmp_path / "here") != {}
    marks = {f"--dir={path}".encode() for path in arenas(run_dir).values()}
    wait_until(lambda: not any(marks & set(command_of(pid).split(b"\0")) for pid in parents()))
    # That of the agent that was killed is left to the next agent on its node.
    shutil.rmtree(lost)
    assert not any(path.exists() for path in arenas(run_dir).values())
