"""Nodes of a local run that are killed, and started again within trainer.max_restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.clusters.local_run import nodes_to_restart
from tests.launcher.local_job import RECIPE, local_job, run_scripts
from tests.launcher.shipped import shipped_job

# A node that SIGKILL ends as often as there is a file of that name.
DIES = 'for file in dies-*; do [ -e "$file" ] || break; rm "$file"; kill -9 $$; done; echo done'
ALLOWED = "trainer.max_restarts=2"


@pytest.mark.parametrize(
    ("ended", "num_restarts", "has_dead_worker", "again"),
    [
        pytest.param({"node-1": 137}, 0, False, {"node-1"}, id="killed"),
        pytest.param({"node-0": 137, "node-1": 137}, 1, False, {"node-0", "node-1"}, id="both"),
        pytest.param({"node-1": 137}, 2, False, set(), id="used-up"),
        pytest.param({"node-1": 137}, 0, True, set(), id="its-worker-was-killed-for-the-last-time"),
        pytest.param({"node-1": 143, "node-0": 1}, 0, False, set(), id="asked-to-end-or-failed"),
        pytest.param({}, 0, False, set(), id="none"),
    ],
)
def test_which_nodes_are_started_again(
    ended: dict[str, int], num_restarts: int, has_dead_worker: bool, again: set[str]
) -> None:
    job = local_job(ALLOWED)

    assert nodes_to_restart(ended, job, num_restarts, has_dead_worker=has_dead_worker) == again


def test_what_recovers_has_standby_nodes_instead() -> None:
    job = shipped_job(RECIPE.replace("pretrain", "checkpointless"), "local")

    assert nodes_to_restart({"node-0": 137}, job, 0, has_dead_worker=False) == set()


@pytest.mark.parametrize(
    ("num_deaths", "status", "words"),
    [
        (2, 0, "node-1 was killed, and is started again\n"),
        (3, 137, "node-1 ended with exit status 137; ending the run"),
    ],
)
def test_a_killed_node_is_started_again_as_often_as_the_job_says(
    tmp_path: Path, num_deaths: int, status: int, words: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for number in range(num_deaths):
        (folder / f"dies-{number}").touch()

    ended, shown = run_scripts(folder, "sleep 1", DIES, overrides=[ALLOWED])

    assert ended == status, shown
    assert words in shown
    assert shown.count("is started again") == 2
