"""What ends a run on this machine that may go on with fewer nodes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.local_run import (
    Happened,
    Outcome,
    decide_outcome,
    ended_text,
    plan_nodes,
)
from launcher.monitor.runstate import next_state, start_state
from launcher.monitor.standing import JobStatus, Phase, decide_standing
from resilience.events import Event, read_events
from resilience.tiered import arena_folder
from resilience.tiered.arena_folder import LOCK_NAME, LOCK_TEXT
from tests.launcher.local_job import local_job, run_scripts, write_run

ELASTIC = ("resilience/checkpointless=default", "resilience/elastic=default",
           "resources.shm_gib=1")  # fmt: skip
RUN_AND_BE_ASKED = """
import os, signal, sys
from pathlib import Path
from launcher.clusters.local_run import run_nodes
from launcher.job import read_job
folder = Path(sys.argv[1])
(folder / "pid").write_text(str(os.getpid()))
status = run_nodes(read_job(folder / "job.json"), folder)
os.kill(os.getpid(), signal.SIGUSR1)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("ended", "words", "status"),
    [
        pytest.param({"node-1": 137}, {}, None, id="one-is-left"),
        pytest.param({"node-1": 143}, {}, None, id="one-was-asked-to-leave"),
        pytest.param({"node-0": 137}, {"lost": ["node-1"]}, 137, id="none-is-left"),
        pytest.param({"node-1": 1}, {"leaving": ["node-1"], "num_started": 1}, None, id="leaving"),
        pytest.param({"node-2": 1}, {"further": ["node-2"], "num_started": 3}, None, id="further"),
        pytest.param({"node-1": 1}, {}, 1, id="failed"),
    ],
)
def test_what_ends_a_run_that_may_shrink(
    ended: dict[str, int], words: dict[str, Any], status: int | None
) -> None:
    outcome = decide_outcome(Happened(ended=ended), local_job(*ELASTIC), **words)

    assert (outcome and outcome.exit_status) == status


def test_a_run_whose_nodes_are_all_asked_to_end_has_not_failed() -> None:
    ended = {"node-0": 143, "node-1": 143}

    outcome = decide_outcome(Happened(ended=ended), local_job(*ELASTIC))

    assert outcome == Outcome(143, "stopped by SIGTERM on node-0", "node-0")
    job = local_job(*ELASTIC)
    seen = replace(start_state(job, ()), exit_status=143, reason=outcome.reason)
    standing = decide_standing(JobStatus(phase=Phase.FORGOTTEN), seen, None, 0.0)
    assert standing.phase is Phase.CANCELLED


@pytest.mark.parametrize(
    ("words", "names"),
    [
        pytest.param({"asked": ["node-1", "node-0"]}, "node-0, node-1", id="by-hand"),
        # node-1 was asked by scale, so one node was to stay, and that was asked by hand.
        pytest.param({"asked": ["node-0", "node-1"], "leaving": ["node-1"], "num_started": 1},
                     "node-0, node-1", id="by-scale-as-well"),
        pytest.param({"asked": ["node-1"]}, None, id="others-were-ended"),
    ],
)  # fmt: skip
def test_a_run_that_too_many_nodes_are_asked_to_leave_says_so(
    words: dict[str, Any], names: str | None
) -> None:
    ended = {"node-0": 143, "node-1": 143}

    outcome = decide_outcome(Happened(ended=ended), local_job(*ELASTIC), **words)

    text = "stopped by SIGTERM on node-0"
    if names:
        text = (f"stopped by too many requests to leave: to {names}; fewer than "
                "resilience.elastic.nodes_min=1 would have stayed")  # fmt: skip
    assert outcome == Outcome(143, text, None if names else "node-0")


LEAVE_BEHIND_THE_OTHERS = """
timeout 30 bash -c "until grep -q node_gone events.jsonl; do sleep 0.05; done"
echo '{"time":1.0,"node":"node-0","rank":null,"generation":0,"step":null,"event":"node_leaving",
"fields":{}}' | tr -d '\n' >> events.jsonl
echo >> events.jsonl
kill -TERM $$
"""


def test_who_has_left_before_is_named_where_too_many_were_asked(tmp_path: Path) -> None:
    status, shown = run_scripts(
        tmp_path, LEAVE_BEHIND_THE_OTHERS, "kill -TERM $$", overrides=ELASTIC
    )

    assert status == 143
    assert "stopped by too many requests to leave: to node-0, node-1; fewer than" in shown


def test_what_became_of_nodes_is_told_though_no_agent_is_left_that_could(tmp_path: Path) -> None:
    status, shown = run_scripts(
        tmp_path, "true", "kill -KILL $$", "kill -TERM $$", overrides=ELASTIC
    )

    assert status == 0, shown
    gone = [each.fields for each in read_events(tmp_path / "events.jsonl")
            if each.event == "node_gone"]  # fmt: skip
    assert {each["node"]: each["text"] for each in gone} == {
        "node-1": "was killed",
        "node-2": "has left",
    }
    assert ended_text(3) == "ended with exit status 3"


@pytest.mark.parametrize(
    ("running", "training", "leaving", "wanted", "coming", "going"),
    [
        pytest.param("01", "01", "", 4, "23", "", id="more"),
        pytest.param("0123", "0123", "", 2, "", "23", id="fewer"),
        pytest.param("12", "12", "", 3, "0", "", id="a-lost-one-comes-back"),
        pytest.param("0123", "0123", "23", 4, "", "", id="more-while-some-leave"),
        pytest.param("013", "013", "3", 4, "2", "", id="one-has-left-already"),
        pytest.param("012", "012", "2", 1, "", "1", id="fewer-while-one-leaves"),
        pytest.param("01", "01", "", 2, "", "", id="as-many"),
        pytest.param("2301", "23", "", 2, "", "01", id="who-starts-goes-before-who-trains"),
        pytest.param("2301", "2301", "", 2, "", "01", id="who-came-last-goes"),
        pytest.param("0123", "23", "", 2, "", "01", id="who-waits-goes-though-it-came-first"),
        pytest.param("0123", "23", "", 1, "", "301", id="who-came-last-of-those-that-train"),
        pytest.param("0123", "", "", 2, "", "23", id="none-trains-yet"),
        pytest.param("2301", "23", "3", 2, "", "1", id="who-leaves-does-not-count"),
    ],
)
def test_nodes_that_come_and_go_for_a_number(
    running: str, training: str, leaving: str, wanted: int, coming: str, going: str
) -> None:
    found = plan_nodes("0123", running, leaving, wanted, training)

    assert found == (list(coming), list(going))


def test_nodes_that_train_have_workers() -> None:
    state = start_state(local_job(*ELASTIC), ("n0", "n1"))
    assert not state.training_nodes

    for name, rank, fields in (
        ("agent_started", None, {}),
        ("generation_opened", None, {"number": 0, "world_size": 1}),
        ("worker_started", 0, {}),
    ):
        event = Event(time=1.0, node="n1", rank=rank, generation=0, step=None, event=name,
                      fields=fields)  # fmt: skip
        state = next_state(state, event)

    assert state.training_nodes == {"n1"}


@pytest.mark.parametrize(("script", "stays"), [("true", False), ("exit 3", True)])
def test_a_run_that_succeeds_leaves_no_memory_of_nodes_that_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, stays: bool
) -> None:
    monkeypatch.setattr(arena_folder, "SHARED_MEMORY", tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    arena = arena_folder.open_arena(run_dir, "node-3")
    (arena / LOCK_NAME).write_bytes(LOCK_TEXT)

    status, _ = run_scripts(run_dir, script)

    assert (status == 0, arena.exists()) == (not stays, stays)


def test_a_run_that_nobody_has_scaled_is_not_ended_by_the_signal(tmp_path: Path) -> None:
    write_run(tmp_path, 'kill -USR1 "$(cat pid)"; kill -USR1 "$(cat pid)"; echo done')

    run = subprocess.run(
        [sys.executable, "-c", RUN_AND_BE_ASKED, tmp_path], capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip

    assert run.returncode == 0, run.stderr
    assert (tmp_path / "logs" / "node-0.log").read_text() == "done\n"
