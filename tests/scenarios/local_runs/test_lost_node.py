"""A node of a run on this machine is lost, and none stands by for it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.command import last_of_each, launch
from tests.launcher.local_world import end_all, launcher_of
from tests.launcher.real_runs import SMALL, named
from tests.processes import command_of, descendants, wait_for_end
from tests.waiting import wait_until

TWO_NODES = (
    "trainer.num_nodes=2",
    "trainer.num_devices=1",
    "trainer.max_steps=100000",
    "resilience/checkpointless=default",
    "resources.shm_gib=1",
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that keeps nothing in memory when the test has ended."""
    yield tmp_path / "run"
    end_all(tmp_path)
    launch("clean", "run", folder=tmp_path)


def agent_of(launcher: int, node: str) -> int:
    """Return the process that is a node's agent; what it has forked has other words."""
    name = f"--node-name={node}".encode()
    words = {pid: command_of(pid).split(b"\0") for pid in descendants(launcher)}
    return min(pid for pid, each in words.items() if b"resilience.agent" in each and name in each)


@pytest.mark.slow
def test_run_on_this_machine_ends_without_saving_what_is_left(run: Path) -> None:
    """Else the other node would wait for another one, save its state and end with 75."""
    words = last_of_each(*SMALL, *TWO_NODES, "run.detach=true", "run.dir=run")
    started = launch(*words, folder=run.parent)
    assert started.status == 0, started.err
    launcher = launcher_of(run)
    wait_until(lambda: len(named(run, "step")) > 5)

    os.kill(agent_of(launcher, "node-1"), signal.SIGKILL)
    wait_for_end(launcher)

    (finished,) = named(run, "run_finished")
    assert finished.fields["exit_status"] == 137
    assert re.fullmatch(
        r"node-1 ended with exit status 137; step \d+ is in no checkpoint; the newest is of step 1",
        finished.fields["reason"],
    )
    assert named(run, "state_saved") == named(run, "gave_up") == []
    kept = {int(path.name.partition("-")[0]) for path in run.glob("checkpoints/*/steps/*")}
    # That of the first step, which every run has.
    assert kept <= {1}
