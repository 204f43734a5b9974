"""Runs on this machine that go on in the background: look at them, and end them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.clusters.running.lock import has_lock_open
from resilience.agent.evidence.locks import LAUNCHER_LOCK
from resilience.events import EventLog
from resilience.tiered.arena_folder import open_arena
from tests.launcher.command import launch, refuse
from tests.launcher.local_world import (
    WORDS,
    launcher_of,
    prepare,
    put_steps,
    start_run,
    status_of,
    tell,
)
from tests.processes import descendants, wait_for_end


def test_detached_run_goes_on_in_a_session_of_its_own_and_ends_by_itself(team: Path) -> None:
    run = start_run(team)
    pid = launcher_of(run)

    assert os.getsid(pid) == pid
    assert status_of(run).out.startswith("llama3-tiny-pretrain: running\n")

    tell(run, 0)
    wait_for_end(pid)

    ended = status_of(run)
    assert ended.status == 0
    assert ended.out.startswith("llama3-tiny-pretrain: succeeded: all nodes succeeded\n")
    assert "version 1: finished" in (run / "logs/launcher.log").read_text()


def test_step_that_is_kept_is_named_as_long_as_it_is_there(team: Path) -> None:
    run = start_run(team)
    pid = launcher_of(run)
    fields = {"event": "checkpoint_saved", "fields": {"num_bytes": 8, "seconds": 0.1}}
    record = {"time": 1e9, "node": "node-0", "rank": 0, "generation": 0, "step": 4, **fields}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    arena = open_arena(run, "node-0")
    try:
        assert "  safe      checkpoint of step 4\n" in status_of(run).out
        os.kill(pid, signal.SIGTERM)
        wait_for_end(pid)
        # A daemon that began anew has an empty arena.
        assert "  safe " not in status_of(run).out
        (arena / "segment-0.meta").touch()
        assert "  safe      checkpoint of step 4 in memory\n" in status_of(run).out
        (arena / "segment-0.meta").unlink()
        # Without a lock: its daemon, or what removed it, was killed.
        assert launch("clean", run.name, folder=team).out == f"removed {arena}\n"
    finally:
        shutil.rmtree(arena, ignore_errors=True)

    assert "  safe " not in status_of(run).out


def test_store_is_looked_at_before_it_is_said_what_is_in_it(team: Path) -> None:
    run = start_run(team)
    with EventLog(run / "events.jsonl", node="node-0", rank=None, generation=0) as events:
        events.write("step_stored", step=8, store="folder:checkpoints")

    def safe() -> str:
        (line,) = (each for each in status_of(run).out.splitlines() if "  safe  " in each)
        return line.removeprefix("  safe      ")

    assert safe() == "step 8 is not in the store any more: it has no whole step"
    put_steps(run, 4)
    assert safe() == "step 8 is not in the store any more: step 4 is the newest there"
    put_steps(run, 8)
    assert safe().startswith("in the store: step 8 of 8, ")
    put_steps(run, 12)
    assert safe().startswith("in the store: step 8 of 8, ")
    (description,) = run.rglob("steps/000000000004-g*/*.json")
    description.write_text("{}")
    told = safe()
    assert told.startswith("in the store: step 8 of 8, ")
    assert "; damaged there: step 4 (steps/" not in told
    assert "; damaged there: step 4 (" in told
    assert "no description of a shard" in told
    shutil.rmtree(next((run / "checkpoints").glob("*/steps/000000000008-*")))
    assert safe() == "in the store: step 12"
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_bytes(b"")
    text = safe()
    assert text.startswith("in the store: step 8 of 8, ")
    assert "; the store cannot be looked at from here: folder:" in text
    tell(run, 0)


def test_run_that_cannot_start_says_so_before_the_command_returns(team: Path) -> None:
    (team / "taken").mkdir()
    (team / "taken" / LAUNCHER_LOCK).mkdir()

    ended = launch(*WORDS, "run.dir=taken", folder=team)

    assert ended.status == 1
    assert ended.err.splitlines()[-1].startswith("the run was not started: cannot make ")


@pytest.mark.parametrize("how", ["removed", "moved", "copied"])
def test_second_launcher_in_a_runs_folder_is_refused(team: Path, how: str) -> None:
    """Whatever becomes of the lock: the run is seen without it, and is not taken for a dead one."""
    run = start_run(team)
    new = launch(*WORDS, f"run.dir={run}", folder=team)
    (run / "events.jsonl").unlink()
    lock = (run / LAUNCHER_LOCK).rename(team / "other")
    if how == "removed":
        lock.unlink()
    elif how == "copied":
        shutil.copy(lock, run / LAUNCHER_LOCK)

    by_force = launch(*WORDS, f"run.dir={run}", folder=team)
    others = [launch(word, str(run), folder=team) for word in ("continue", "clean")]
    shown = status_of(run).out
    cancelled = launch("cancel", str(run), folder=team)

    assert (new.status, by_force.status) == (2, 1)
    assert f"another launcher or program works in {run}" in by_force.err
    assert all("is running; end it first" in each.err for each in others)
    assert "running: its launcher.lock was removed or moved" in shown
    assert cancelled.out == f"{run} has ended: what {run} held of it was removed or moved\n"


def test_cancelled_run_says_who_asked_and_leaves_no_process(team: Path) -> None:
    run = start_run(team)
    started = {launcher_of(run), *descendants(launcher_of(run))}
    assert len(started) >= 3

    cancelled = launch("cancel", run.name, folder=team)

    assert cancelled.status == 0, cancelled.err
    assert cancelled.out.startswith("llama3-tiny-pretrain has ended after ")
    for pid in started:
        wait_for_end(pid)
    assert "asked for its end with `launcher cancel`" in status_of(run).out
    assert "stopped by SIGINT" in status_of(run).out


def test_run_that_no_launcher_has_taken_up_is_not_said_to_have_ended(tmp_path: Path) -> None:
    """A starting launcher writes its files first; a cancel before its lock is to be repeated."""
    launch("recipe=llama/llama3_tiny_pretrain", "run.dir=run", folder=tmp_path)
    (tmp_path / "run/events.jsonl").touch()
    ended = launch("cancel", "run", folder=tmp_path)
    assert ended.err == "llama3-tiny-pretrain was not cancelled: no launcher has taken it up\n"
    assert (ended.status, ended.out) == (1, "")


def test_run_in_a_folder_that_takes_no_file_is_cancelled(team: Path) -> None:
    run = start_run(team)
    (run / "cancelled.json").mkdir()

    cancelled = launch("cancel", run.name, folder=team)

    assert cancelled.status == 0, cancelled.err
    assert (
        cancelled.err
        == f"cannot write to {run}: Is a directory; its status will not say who asked\n"
    )
    assert cancelled.out.startswith("llama3-tiny-pretrain has ended after ")


@pytest.mark.parametrize("word", ["llama3-tiny-pretrain", "runs/llama3-tiny-pretrain"])
def test_run_whose_folder_was_removed_is_cancelled(team: Path, word: str) -> None:
    """By its launcher, which still has the lock open that was in the folder.

    A launcher that only waits stands for the real one, which would end the run by itself meanwhile.
    """
    run = team / "runs" / "llama3-tiny-pretrain"
    run.mkdir(parents=True)
    (run / LAUNCHER_LOCK).touch()
    # A shell has what it starts in the background ignore SIGINT.
    waits = (
        "import fcntl, os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "held = [os.open(each, os.O_RDONLY) for each in sys.argv[1:]]; "
        "[fcntl.flock(each, fcntl.LOCK_EX) for each in held]; print(flush=True); signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", waits, str(run / LAUNCHER_LOCK), str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        try:
            assert launcher.stdout
            launcher.stdout.readline()
            shutil.rmtree(run)

            ended = launch("cancel", word, folder=team)

            assert (ended.status, ended.err) == (0, "")
            assert ended.out == f"{word} has ended: what {run} held of it was removed or moved\n"
            assert launcher.wait(timeout=30) in (1, -signal.SIGINT)
        finally:
            launcher.kill()
    assert not run.exists()
    assert f"no run '{word}'" in refuse(team, "cancel", word)


def test_number_that_another_process_has_is_never_signalled(team: Path) -> None:
    """The lock's file has it from another container, or from a launcher that has gone."""
    run = start_run(team)
    pid = launcher_of(run)
    content = json.loads((run / LAUNCHER_LOCK).read_text())
    (run / LAUNCHER_LOCK).write_text(json.dumps(content | {"pid": os.getpid()}))

    cancelled = launch("cancel", str(run), folder=team)

    assert cancelled.status == 1
    assert "launcher.lock is locked, but by no launcher that is seen from here; " in cancelled.err
    os.kill(pid, signal.SIGTERM)
    wait_for_end(pid)
    assert "cancelled: not by this launcher; stopped by SIGTERM" in status_of(run).out
    again = launch("cancel", str(run), folder=team)
    assert again.out.startswith("llama3-tiny-pretrain has ended before: cancelled")


def test_lock_of_another_program_is_told_as_such(team: Path) -> None:
    """`flock launcher.lock ...` writes no number: nothing is signalled, and no process 0 named."""
    run = start_run(team)
    os.kill(pid := launcher_of(run), signal.SIGKILL)
    wait_for_end(pid)
    with (run / LAUNCHER_LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        cancelled = launch("cancel", str(run), folder=team)

    assert cancelled.status == 1
    assert "or end the other program that locks the file" in cancelled.err
    assert "process 0" not in cancelled.err
    launch("clean", str(run), folder=team)


def test_lock_is_known_by_another_path_of_its_folder(tmp_path: Path) -> None:
    """A folder may be mounted twice: the launcher has the same file open by another name."""
    mounts = [tmp_path / name for name in "ab"]
    for mount in mounts:
        mount.mkdir()
    with (mounts[0] / LAUNCHER_LOCK).open("w"):
        (mounts[1] / LAUNCHER_LOCK).hardlink_to(mounts[0] / LAUNCHER_LOCK)

        assert all(has_lock_open(os.getpid(), mount) for mount in mounts)
        assert not has_lock_open(os.getppid(), mounts[0])
    assert not has_lock_open(os.getpid(), mounts[1])


def test_failed_run_says_its_first_error_first(team: Path) -> None:
    prepare(
        team,
        "#!/bin/sh\n{# job #}\n"
        "{% if node == 'node-0' %}echo the reason for it; exit 7{% endif %}\n\nsleep 1000000\n",
    )
    run = start_run(team)
    wait_for_end(json.loads((run / LAUNCHER_LOCK).read_text())["pid"])

    assert status_of(run).out.startswith(
        "llama3-tiny-pretrain: failed: node-0 ended with exit status 7\n"
    )
    logs = launch("logs", run.name, folder=team)
    first, second, *_ = logs.out.splitlines()
    assert first == "first error: node-0 ended with exit status 7"
    assert second == "first error: the reason for it"
    assert logs.out.endswith("\nnode-0: the reason for it\n")


def test_followed_logs_go_on_until_the_run_has_ended(team: Path) -> None:
    run = start_run(team, "trainer.num_nodes=2", "trainer.global_batch_size=16")
    tell(run, 0)

    logs = launch("logs", run.name, "-f", folder=team)

    assert logs.status == 0
    assert sorted(logs.out.splitlines()) == [
        "node-0: 2026-11-24 10:00:02 node-0 is there",
        "node-0: the reason",
        "node-1: 2026-11-24 10:00:02 node-1 is there",
        "node-1: the reason",
    ]


def test_runs_are_listed_with_how_they_stand(team: Path) -> None:
    (team / "runs").mkdir()
    one = start_run(team)
    two = start_run(team, "run.name=another")
    tell(one, 0)
    wait_for_end(launcher_of(one))

    listed = launch("runs", folder=team)

    assert listed.status == 0
    assert [line.split()[:5] for line in listed.out.splitlines()] == [
        ["another", "running", "step", "0", "of"],
        ["llama3-tiny-pretrain", "succeeded", "step", "0", "of"],
    ]
    assert launch("cancel", str(two), folder=team).status == 0


def test_mistyped_run_is_told_the_nearest_names(team: Path) -> None:
    run = start_run(team)

    for command in ("status", "logs", "cancel"):
        assert refuse(team, command, "llama3-tiny-pretrian") == (
            "no run 'llama3-tiny-pretrian'; closest: 'llama3-tiny-pretrain'\n"
        )
    assert "allowed: 0 to 3" in refuse(team, "logs", run.name, "--rank", "9")
    assert "no option '--rnak'" in refuse(team, "logs", run.name, "--rnak")


@pytest.mark.parametrize("words", [("action=render",), ("action=run", "--multirun")])
def test_only_one_run_of_this_machine_can_be_detached(tmp_path: Path, words: tuple[str]) -> None:
    ended = launch("recipe=llama/llama3_tiny_pretrain", "run.detach=true", *words, folder=tmp_path)

    assert ended.status == 2
    assert "run.detach true needs action=run without --multirun" in ended.err
