"""A node whose Slurm daemon is lost: its agent trains on, and the job is queued again elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.events import EventReader
from tests.processes import command_of
from tests.scenarios.slurm import cluster
from tests.scenarios.slurm.jobs import Slurm, agents, submit_recipe

pytest.importorskip("torch", reason="a worker needs torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE = (
    "recipe=llama/llama3_tiny_pretrain",
    "resources.shm_gib=1",
    "trainer.num_nodes=1",
    "trainer.num_devices=1",
    "trainer.max_steps=100000",
    "trainer.log_every_n_steps=1",
)
RUN_S = 180.0
USABLE = {"idle", "allocated", "mixed"}


@contextmanager
def stopped_daemon(slurm: Slurm, node: str) -> Iterator[None]:
    """Have a node's slurmd stand still, which the controller takes for a lost node."""
    pid = int((slurm.folder / f"slurmd.{node}.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        slurm.wait_until(lambda: is_usable(slurm, node), f"{node} is back")


def is_usable(slurm: Slurm, node: str) -> bool:
    """Return whether a node takes jobs; one that is back is asked to."""
    slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
    state = slurm.ask("sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T")
    return state.split()[0] in USABLE


def nodes_of_steps(run_dir: Path) -> list[str]:
    events = EventReader(run_dir / "events.jsonl").read_new()
    return [each.node for each in events if each.event == "step"]


def test_orphaned_agent_ends_before_its_successor_trains(slurm: Slurm, tmp_path: Path) -> None:
    run_dir = tmp_path / "there"
    job_id = submit_recipe(run_dir, *RECIPE)
    cluster.wait_until(lambda: len(nodes_of_steps(run_dir)) > 5, "steps", RUN_S)
    first = slurm.field(job_id, "NodeList")
    orphans = agents(job_id, first)

    with stopped_daemon(slurm, first):
        cluster.wait_until(
            lambda: nodes_of_steps(run_dir)[-1] != first, "steps of another node", RUN_S
        )
        alive = [pid for pid in orphans if command_of(pid)]

    nodes = nodes_of_steps(run_dir)
    assert orphans
    assert alive == []
    assert first not in nodes[nodes.index(nodes[-1]) :]
