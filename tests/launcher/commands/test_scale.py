"""A run on this machine is given another number of nodes."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.clusters.local_nodes import end_strays
from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.local import LocalMachine
from launcher.clusters.running.lock import held_lock, read_lock
from launcher.commands.scale import nodes_lost, trains_with, waited_for
from launcher.commands.sight import Sight
from launcher.errors import RecipeError
from launcher.monitor.standing import Phase, Standing
from resilience.events import Event, read_events
from tests.launcher.command import launch
from tests.launcher.commands.test_status import (
    ELASTIC,
    STARTED,
    Happened,
    gone,
    opened,
    state_of,
)
from tests.launcher.shipped import shipped_job
from tests.resilience.agent.test_drain import drain
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "elastic.md").read_text("utf-8")


@pytest.mark.slow
def test_a_run_grows_and_shrinks_as_the_page_says(tmp_path: Path) -> None:
    text, *_ = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # As long as it takes to type all that.
    text = text.replace("run.detach=true", "run.detach=true trainer.max_steps=4000")

    done = subprocess.run(
        ["bash", "-e", "-u", "-o", "pipefail", "-c", text],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr + done.stdout
    assert "llama3-tiny-elastic goes on with 4 nodes\n" in done.stdout
    assert "llama3-tiny-elastic goes on with 2 nodes\n" in done.stdout
    assert "training (2 of 2 workers)" in done.stdout
    assert "  size      2 nodes\n" in done.stdout
    assert " has ended after " in done.stdout
    events = read_events(tmp_path / "runs" / "elastic" / "events.jsonl")
    sizes = [each.fields["world_size"] for each in events if each.event == "generation_opened"]
    assert (max(sizes), sizes[-1]) == (4, 2)
    # Each node tells of itself. Those of the last generation were cancelled.
    last = max(each.generation for each in events if each.event == "generation_opened")
    asked, left = (
        {each.node for each in events if each.event == name and each.generation < last}
        for name in ("node_leaving", "node_left")
    )
    assert len(asked) == 2
    assert asked <= left
    assert not [each for each in events if each.event == "recovery_fallback"]
    # It was cancelled, and keeps its checkpoints for another start.
    assert launch("clean", "elastic", folder=tmp_path).status == 0


@pytest.mark.slow
def test_a_node_that_only_starts_goes_on_alone_where_the_last_one_that_trained_is_killed(
    tmp_path: Path,
) -> None:
    assert launch(*ONE_NODE, folder=tmp_path).status == 0
    folder = tmp_path / "runs" / "r"
    wait_for(folder, lambda event: (event.step or 0) >= 20)
    launch("scale", "r", "nodes=2", folder=tmp_path)
    wait_for(folder, lambda event: (event.node, event.event) == ("node-1", "agent_started"))

    assert (holder := read_lock(folder))
    assert end_strays(holder.run_id, "node-0")[0]

    events = wait_for(folder, lambda event: event.node == "node-1" and (event.step or 0) >= 20)
    assert launch("cancel", "r", folder=tmp_path).status == 0
    assert launch("clean", "r", folder=tmp_path).status == 0
    (fallback,) = [each for each in events if each.event == "recovery_fallback"]
    assert (fallback.node, fallback.fields["source"]) == ("node-1", "folder")


@pytest.mark.slow
def test_scale_that_waits_says_at_once_that_a_node_has_ended_and_another_starts_it_anew(
    tmp_path: Path,
) -> None:
    assert launch(*ONE_NODE, folder=tmp_path).status == 0
    folder = tmp_path / "runs" / "r"
    wait_for(folder, lambda event: (event.step or 0) >= 20)

    with subprocess.Popen(
        [sys.executable, "-m", "launcher", "scale", "r", "nodes=2", "--wait"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
        text=True,
    ) as waiting:  # fmt: skip
        wait_for(folder, lambda event: (event.node, event.event) == ("node-1", "agent_started"))
        assert (holder := read_lock(folder))
        assert end_strays(holder.run_id, "node-1")[0]
        _, err = waiting.communicate(timeout=60)
    again = launch("scale", "r", "nodes=2", "--wait", folder=tmp_path)
    assert launch("cancel", "r", folder=tmp_path).status == 0
    assert launch("clean", "r", folder=tmp_path).status == 0

    assert waiting.returncode == 1
    assert "llama3-tiny-elastic does not come to 2 nodes: node-1 was killed" in err
    assert (again.status, again.out) == (0, "llama3-tiny-elastic goes on with 2 nodes\n"), again.err


@pytest.mark.slow
def test_a_node_that_others_ask_to_leave_is_replaced_where_the_size_is_asked_for_after(
    tmp_path: Path,
) -> None:
    words = (
        "recipe=llama/llama3_tiny_elastic", "action=run", "run.dir=runs/r", "run.detach=true",
        "resilience.elastic.hold_s=0", "resilience.elastic.scale_up_snooze_s=0",
        "trainer.max_steps=100000",
    )  # fmt: skip
    assert launch(*words, folder=tmp_path).status == 0
    folder = tmp_path / "runs" / "r"
    wait_for_size(folder, 3)
    launch("scale", "r", "nodes=3", "--wait", folder=tmp_path)

    drained = drain("node-1", folder, f"--token-file={folder / 'run.token'}")
    scaled = launch("scale", "r", "nodes=3", "--wait", folder=tmp_path)
    again = launch("status", "r", folder=tmp_path)
    drained_later = drain("node-2", folder, f"--token-file={folder / 'run.token'}")
    events = wait_for_size(folder, 2)
    log = (folder / "logs" / "launcher.log").read_text()
    ended = launch("cancel", "r", folder=tmp_path)

    assert (drained[0], drained_later[0], scaled.status, ended.status) == (0, 0, 0, 0)
    assert "  size      3 nodes\n" in again.out
    sizes = [each.fields["world_size"] for each in events if each.event == "generation_opened"]
    assert sizes[-3:] == [2, 3, 2]
    # One in the place of the first; nobody has asked for more since the second.
    assert log.count(" has been started\n") == 1
    assert launch("clean", "r", folder=tmp_path).status == 0


ONE_NODE = (
    "recipe=llama/llama3_tiny_elastic", "action=run", "run.dir=runs/r", "run.detach=true",
    "trainer.num_nodes=1", "trainer.max_steps=100000", "trainer.global_batch_size=16",
    "data.seq_length=32",
)  # fmt: skip


def wait_for_size(folder: Path, size: int) -> list[Event]:
    """Return the events once the newest generation has so many workers."""

    def has_size() -> bool:
        opened = [each for each in events_of(folder) if each.event == "generation_opened"]
        return bool(opened) and opened[-1].fields["world_size"] == size

    wait_until(has_size, (folder / "logs" / "launcher.log").read_text)
    return events_of(folder)


def wait_for(folder: Path, is_it: Callable[[Event], bool]) -> list[Event]:
    """Return the events once there is such a one."""
    log = folder / "logs" / "launcher.log"
    wait_until(lambda: any(map(is_it, events_of(folder))), log.read_text)
    return events_of(folder)


def events_of(folder: Path) -> list[Event]:
    return read_events(folder / "events.jsonl")


@pytest.mark.parametrize(
    ("overrides", "size", "text"),
    [
        ([], "2", "keeps its size, since its resilience.elastic is null; start a run with res"),
        (["resilience/elastic=default"], "0", "nodes='0' is no size of llama3-tiny-pretrain; "),
        (["resilience/elastic=default"], "9", "allowed: 1, 2"),
        (["resilience/elastic=default"], "all", "nodes='all' is no size"),
        (["resilience/elastic=default"], "2", "llama3-tiny-pretrain has ended: "),
        (["resilience/elastic=default"], "2", "goes on at another size with launcher continue "),
    ],
)
def test_a_size_that_a_run_cannot_have_is_refused(
    tmp_path: Path, overrides: list[str], size: str, text: str
) -> None:
    launch("recipe=llama/llama3_tiny_pretrain", f"run.dir={tmp_path}/run", *overrides,
           folder=tmp_path)  # fmt: skip
    (tmp_path / "run" / "events.jsonl").touch()

    ended = launch("scale", "run", f"nodes={size}", folder=tmp_path)

    assert ended.status == 2
    assert text in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "run" / "size.json").exists()


def test_a_run_of_another_user_is_asked_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = pwd.getpwuid(os.geteuid()).pw_name
    run = RunFolder(path=tmp_path, job=shipped_job("llama/llama3_tiny_elastic", "local"))

    with held_lock(tmp_path, "run"):
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(RecipeError, match=f"the run of user {owner}; allowed: {owner} scales"):
            LocalMachine().scale(run, 2)

    assert not (tmp_path / "size.json").exists()


def test_a_run_trains_with_so_many_nodes_when_all_their_workers_are_there() -> None:
    happened: list[Happened] = [
        ("launcher", None, "run_started", {}),
        ("n0", None, "agent_started", {}),
        opened(2, 0),
        STARTED,
        ("n1", 1, "worker_started", {}),
        ("n3", None, "node_leaving", {}),  # it ended with the start before, or stands by
        ("n1", None, "node_leaving", {}),
    ]
    states = [state_of(ELASTIC, *happened[: end + 1]) for end in range(len(happened))]
    seen = [(trains_with(state, 2), trains_with(state, 3)) for state in states]

    no = (False, False)
    assert seen == [no, no, no, no, (True, False), (True, False), no]


def test_what_a_change_of_size_waits_for_is_named() -> None:
    """Whatever that is: producers of batches, a node that is to leave, or the cluster's queue."""
    job = shipped_job("llama/llama3_tiny_elastic", "slurm")
    found: list[Happened] = [
        opened(2, 0),
        STARTED,
        ("n1", 1, "worker_started", {}),
        ("n1", None, "node_leaving", {}),
        ("n0", 0, "batch_late", {"text": "batch 7 has not come yet"}),
    ]

    def told(phase: Phase, why: str, happened: list[Happened]) -> str:
        return waited_for(
            Sight(
                run=RunFolder(path=Path("r"), job=job), time=1.0, last_event=1.0,
                standing=Standing(phase=phase, why=why),
                state=state_of(job, *happened),
            )
        )  # fmt: skip

    assert told(Phase.QUEUED, "Resources", []) == "queued: Resources"
    assert told(Phase.RUNNING, "", found) == (
        "process group (2 of 2 workers), batch 7 has not come yet; 2 nodes, n1 to leave"
    )


def test_a_node_that_ends_before_a_run_has_grown_by_it_is_named_at_once() -> None:
    """Nobody starts it anew by itself."""
    first, asked = [opened(2, 0), gone("n5")], ("n1", None, "node_leaving", {})
    n2_gone = gone("n2", "ended with exit status 1")
    before, after = state_of(ELASTIC, *first), state_of(ELASTIC, *first, n2_gone)
    both = state_of(ELASTIC, *first, n2_gone, gone("n1"))
    left = state_of(ELASTIC, *first, asked, gone("n1", "has left"))

    assert nodes_lost(before, before, 3) == ""
    assert nodes_lost(before, after, 3) == "n2 ended with exit status 1"
    assert nodes_lost(before, both, 3) == "n1 was killed, n2 ended with exit status 1"
    assert nodes_lost(before, left, 3) == ""
    # Who makes a run smaller waits for what is left.
    assert nodes_lost(before, both, 2) == ""
    # A run that has not begun has no size yet.
    assert nodes_lost(state_of(ELASTIC), state_of(ELASTIC, gone("n2")), 2)
