"""Runs whose nodes are small scripts: what they end with, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from launcher.clusters.local_nodes import node_environment
from launcher.clusters.local_run import GRACE_S, Happened, Outcome, decide_outcome, run_nodes
from launcher.clusters.ports import hold_port, unassigned_ports
from resilience.agent.options import parse_options
from resilience.events import read_events
from tests.disks import open_disk
from tests.launcher.clusters.killed_worker import WORD
from tests.launcher.command import launch
from tests.launcher.local_job import local_job, run_scripts, write_run
from tests.launcher.shipped import rendered
from tests.processes import command_of, descendants, wait_for_end

TIMEOUT_S = 120
FOREVER = "sleep 1000000"
# A process in a session of its own, as a torch worker is, that ignores SIGTERM.
STRAY = """setsid bash -c 'trap "" TERM; echo $$ > stray; echo > up; sleep 1000000 & wait' &"""
RUN = """
import sys
from pathlib import Path
from launcher.clusters.local_run import run_nodes
from launcher.job import read_job
folder = Path(sys.argv[1])
sys.exit(run_nodes(read_job(folder / "job.json"), folder, grace_s=float(sys.argv[2])))
"""


def last_event(folder: Path) -> tuple[str, dict[str, object]]:
    event = read_events(folder / "events.jsonl")[-1]
    return event.event, dict(event.fields)


@contextmanager
def running(
    folder: Path, *scripts: str, grace_s: float = 30.0
) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """Start a launcher; yields it and all its processes once a node has written to `up`."""
    folder.mkdir()
    for name in ("up", "go", "may"):
        os.mkfifo(folder / name)
    write_run(folder, *scripts)
    launcher = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(grace_s)], stdout=subprocess.PIPE, text=True
    )
    try:
        (folder / "up").read_text()
        yield launcher, descendants(launcher.pid)
    finally:
        launcher.kill()
        launcher.communicate()


def test_run_of_nodes_that_succeed(tmp_path: Path) -> None:
    status, shown = run_scripts(tmp_path, "echo one", "echo two >&2")

    assert status == 0
    assert (tmp_path / "logs/node-0.log").read_text() == "one\n"
    assert (tmp_path / "logs/node-1.log").read_text() == "two\n"
    assert [event.event for event in read_events(tmp_path / "events.jsonl")] == [
        "run_started",
        "run_finished",
    ]
    assert last_event(tmp_path)[1] == {"exit_status": 0, "reason": "all nodes succeeded"}
    started = read_events(tmp_path / "events.jsonl")[0]
    job = local_job("trainer.num_nodes=2", "trainer.global_batch_size=16")
    assert (started.node, started.rank, started.generation) == ("launcher", None, 0)
    assert started.fields == {
        "recipe": "llama/llama3_tiny_pretrain",
        "version": 1,
        "digest": job.digest(),
        "num_nodes": 2,
        "num_devices": 2,
    }
    assert f"report      {tmp_path / 'report.html'}" in shown
    assert "llama/llama3_tiny_pretrain version 1: finished" in shown


def test_full_disk_does_not_change_what_the_run_came_to(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: a node fills the log up to it."""
    write_run(tmp_path, "yes '' >> events.jsonl; exit 3")

    run = subprocess.run(
        ["bash", "-c", 'ulimit -f 64; exec "$0" "$@"', sys.executable, "-c", RUN, tmp_path, "30"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert run.returncode == 3
    assert "Traceback" not in run.stderr
    assert f"cannot write events to {tmp_path}/events.jsonl: " in " ".join(run.stdout.split("\n"))
    assert "llama/llama3_tiny_pretrain version 1: " in run.stdout


def test_first_failing_node_gives_the_status_and_ends_the_others(tmp_path: Path) -> None:
    status, shown = run_scripts(tmp_path, FOREVER, "echo the reason; exit 7")

    assert status == 7
    assert last_event(tmp_path)[1] == {
        "exit_status": 7,
        "reason": "node-1 ended with exit status 7",
    }
    assert "[node-1] the reason\n" in shown
    assert f"[node-1] the whole log: {tmp_path / 'logs/node-1.log'}" in shown


def test_worker_that_failed_first_is_shown_with_its_traceback(tmp_path: Path) -> None:
    message = "ValueError: [bold]bad[/bold] \x1b[31m"
    (tmp_path / "line").write_text(line_of("worker_failed", 3, "node-1", message=message))
    (tmp_path / "log").write_text(
        "[rank3]: Traceback (most recent call last):\n"
        "[rank2]: Traceback (most recent call last):\n"
        '[rank3]:   File "a.py", line 1\n'
        "[rank2]: OSError: reset by peer\n"
        "[rank3]: ValueError: [bold]bad[/bold] \x1b[31m\n"
        "what the agent says\n"
    )
    status, shown = run_scripts(tmp_path, FOREVER, "cat line >> events.jsonl; cat log; exit 1")

    assert status == 1
    assert (
        "[node-1] rank 3 failed: ValueError: [bold]bad[/bold] \\x1b[31m\n"
        "[node-1] [rank3]: Traceback (most recent call last):\n"
        '[node-1] [rank3]:   File "a.py", line 1\n'
        "[node-1] [rank3]: ValueError: [bold]bad[/bold] \\x1b[31m\n"
        "[node-1] the whole log: "
    ) in shown


def line_of(event: str, rank: int, node: str, **fields: str) -> str:
    head = {"time": 1.0, "node": node, "rank": rank, "generation": 0, "step": None}
    return json.dumps({**head, "event": event, "fields": fields}) + "\n"


PEERS_FAILURE = line_of("worker_failed", 0, "node-0", message="RuntimeError: reset by peer")
OWN_FAILURE = line_of("worker_failed", 3, "node-1", message="ValueError: bad")


@pytest.mark.parametrize(
    ("failure", "end", "follows"),
    [
        pytest.param("", "was killed by SIGKILL", "[node-1] its words\n", id="killed"),
        pytest.param(
            OWN_FAILURE,
            "ended with exit status 1: ValueError: bad",
            "[node-1] rank 3 failed: ValueError: bad\n",
            id="raised",
        ),
    ],
)
def test_worker_that_died_first_is_named_before_all_that_workers_say(
    tmp_path: Path, failure: str, end: str, follows: str
) -> None:
    """Its agent says so to the coordinator, which is on the other node; there a peer has failed."""
    (tmp_path / "lines").write_text(
        line_of("worker_started", 3, "node-1")
        + failure
        + PEERS_FAILURE
        + line_of("fault_detected", 3, "node-0", reason="died", text=f"rank 3 {end}")
    )
    log = tmp_path / "logs/node-1/rank-3.generation-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("its words\n")
    peer = "cat lines >> events.jsonl; printf 'Traceback (most recent call last):\\nOSError: x\\n'"

    _, shown = run_scripts(tmp_path, f"{peer}; exit 1", FOREVER)

    assert (
        f"[node-1] rank 3 {end}; its log: {log}\n{follows}"
        f"[node-1] the whole log: {tmp_path / 'logs/node-1.log'}\n"
    ) in shown
    assert "reset by peer" not in shown
    assert "OSError" not in shown


@pytest.mark.slow
def test_worker_that_is_killed_is_named_and_not_what_its_peer_meets(tmp_path: Path) -> None:
    """Two workers in one collective after the other, of which one is killed."""
    job = local_job("trainer.num_nodes=1", "trainer.global_batch_size=8", "trainer.max_steps=4")
    for name, text in rendered(job).items():
        program = text.replace(
            "\n  recipes_training \\\n", "\n  tests.launcher.clusters.killed_worker \\\n"
        )
        (tmp_path / name).write_text(program)
    shown = StringIO()

    status = run_nodes(job, tmp_path, Console(file=shown, width=200))

    log = tmp_path / "logs/node-0/rank-1.generation-0.log"
    said = [line for line in shown.getvalue().splitlines() if line.startswith("[node-0] ")]
    assert status == 137, shown.getvalue()
    assert said[0].startswith("[node-0] rank 1 was killed by SIGKILL")
    assert said[0].endswith(f"; its log: {log}")
    assert f"[node-0] {WORD}" in said
    assert "Traceback" not in shown.getvalue()
    assert "rank 0 failed" not in shown.getvalue()
    assert "1, " in shown.getvalue().partition("  faults ")[2]
    assert "no step lost" not in shown.getvalue()


def test_time_limit_ends_the_run(tmp_path: Path) -> None:
    status, _ = run_scripts(tmp_path, FOREVER, overrides=["time_limit='00:00:01'"])

    assert status == 124
    assert last_event(tmp_path)[1]["reason"] == "time limit 00:00:01 reached"


def test_node_gets_sigterm_and_time_to_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    waits = "trap 'echo saved > saved; exit 0' TERM; echo > up; sleep 1000000 & wait"

    status, _ = run_scripts(tmp_path, waits, "read < up; exit 3")

    assert status == 3
    assert (tmp_path / "saved").read_text() == "saved\n"


def test_node_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    ignores = "trap '' TERM; echo $$ > pid; echo > up; while :; do sleep 1000000; done"

    status, _ = run_scripts(tmp_path, ignores, "read < up; exit 3", grace_s=0.1)

    assert status == 3
    assert not command_of(int((tmp_path / "pid").read_text()))


def test_what_a_node_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")

    status, _ = run_scripts(tmp_path, f"{STRAY}\nread < up")

    assert status == 0
    assert not command_of(int((tmp_path / "stray").read_text()))


def test_agent_has_ended_its_workers_before_its_own_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    assert parse_options(["--", "python", "train.py"]).grace_s < GRACE_S


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_launcher_that_is_asked_to_end_ends_the_run(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    folder = tmp_path / "run"
    with running(folder, f"{STRAY}\nwait", FOREVER) as (launcher, pids):
        launcher.send_signal(number)
        shown, _ = launcher.communicate(timeout=TIMEOUT_S)

    assert launcher.returncode == status
    assert f"stopped by {number.name}; ending the run\n" in shown
    assert last_event(folder)[1] == {"exit_status": status, "reason": f"stopped by {number.name}"}
    assert not [pid for pid in pids if command_of(pid)]


def test_second_interrupt_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo > up; while :; do sleep 1000000; done"
    with running(tmp_path / "run", stubborn, grace_s=1e6) as (launcher, pids):
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout is not None
        while "ending the run" not in launcher.stdout.readline():
            pass
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=TIMEOUT_S)

    assert launcher.returncode == 130
    assert not [pid for pid in pids if command_of(pid)]


def test_first_interrupt_of_a_run_that_ends_by_itself_lets_its_nodes_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saves = "trap 'read < may; echo saved > saved; exit 0' TERM; echo > up; sleep 1000000 & wait"
    with running(folder, saves, "read < go; exit 3", grace_s=1e6) as (launcher, _):
        assert launcher.stdout is not None
        (folder / "go").write_text("\n")
        assert any("ending the run" in line for line in launcher.stdout)
        launcher.send_signal(signal.SIGINT)
        assert any("the run is ending already" in line for line in launcher.stdout)
        (folder / "may").write_text("\n")
        launcher.communicate(timeout=TIMEOUT_S)

    assert launcher.returncode == 3
    assert (folder / "saved").read_text() == "saved\n"


def test_launcher_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path / "run", f"{STRAY}\nwait", FOREVER, grace_s=0.1) as (launcher, pids):
        assert int((tmp_path / "run/stray").read_text()) in pids
        launcher.kill()
        for pid in pids:
            wait_for_end(pid)

    assert not [pid for pid in pids if command_of(pid)]


def test_keeper_that_is_killed_ends_its_node_and_the_run(tmp_path: Path) -> None:
    with running(tmp_path / "run", f"{STRAY}\nwait", FOREVER) as (launcher, pids):
        (keeper,) = (
            pid
            for pid, command in zip(pids, map(command_of, pids), strict=True)
            if b"keeper.py" in command and b"node-0.sh" in command
        )
        os.kill(keeper, signal.SIGKILL)
        launcher.communicate(timeout=TIMEOUT_S)
        for pid in pids:
            wait_for_end(pid)

    assert launcher.returncode == 137


def test_workers_of_a_checkout_import_it_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_scripts(tmp_path, '"$LAUNCHER_PYTHON" -c "import recipes_training as x; print(x.__file__)"')

    log = (tmp_path / "logs/node-0.log").read_text()
    assert Path(log.strip()) == Path(__file__).parents[3] / "recipes_training/__init__.py"


def test_workers_of_an_installed_launcher_need_no_path(tmp_path: Path) -> None:
    (tmp_path / "launcher/_data").mkdir(parents=True)

    env = node_environment({}, "127.0.0.1:1", "id", package=tmp_path / "launcher")

    assert "PYTHONPATH" not in env


def test_path_of_the_person_stays_behind_ours(tmp_path: Path) -> None:
    env = node_environment({"PYTHONPATH": "/mine"}, "e:1", "id", package=tmp_path / "launcher")

    assert env["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/mine"


class FirstOf:
    """A random source that always takes the first."""

    def choice(self, numbers: list[int]) -> int:
        return numbers.pop(0)


def test_two_launchers_never_hold_the_same_port() -> None:
    with hold_port(FirstOf()) as one, hold_port(FirstOf()) as other:  # type: ignore[arg-type]
        assert one != other


@pytest.mark.parametrize(
    ("local_range", "num_ports"),
    [
        pytest.param("32768\t60999\n", 65536 - 30200 - (60999 - 32768 + 1), id="usual"),
        pytest.param("1024 65535", 65536 - 30200, id="all-are-assigned"),
    ],
)
def test_ports_that_linux_gives_away_are_left_out(local_range: str, num_ports: int) -> None:
    assert len(unassigned_ports(local_range)) == num_ports


def outcome_of(node: str, status: int) -> Outcome:
    return Outcome(status, f"{node} ended with exit status {status}", node)


@pytest.mark.parametrize(
    ("happened", "outcome"),
    [
        pytest.param(Happened(ended={}), None, id="nothing"),
        pytest.param(Happened(ended={"node-1": 0}), None, id="success"),
        pytest.param(Happened(ended={"node-1": 3}), outcome_of("node-1", 3), id="failure"),
        pytest.param(
            Happened(ended={"node-1": 3}, signals=(2,), is_late=True),
            Outcome(130, "stopped by SIGINT"),
            id="a-person-comes-first",
        ),
    ],
)
def test_what_ends_a_run(happened: Happened, outcome: Outcome | None) -> None:
    assert decide_outcome(happened, local_job()) == outcome


STANDBY = ("resilience/checkpointless=default", "resilience.checkpointless.standby_nodes=1",
           "resources.shm_gib=1")  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "lost", "teller"),
    [
        pytest.param({"node-1": 137}, [], None, id="one-killed"),
        pytest.param({"node-1": 143}, [], None, id="one-ended-by-sigterm"),
        pytest.param({"node-1": 0}, ["node-2"], None, id="success-after-a-loss"),
        pytest.param({"node-1": 1}, [], "node-1", id="failure-is-no-death"),
        pytest.param({"node-1": 137}, ["node-2"], "node-1", id="more-killed-than-stood-by"),
        pytest.param({"node-0": 137, "node-1": 137}, [], "node-0", id="two-at-once"),
        pytest.param({"node-0": 137, "node-1": 3}, [], "node-1", id="the-failure-not-the-death"),
    ],
)
def test_what_ends_a_run_with_nodes_that_stand_by(
    ended: dict[str, int], lost: list[str], teller: str | None
) -> None:
    outcome = outcome_of(teller, ended[teller]) if teller else None
    assert decide_outcome(Happened(ended=ended), local_job(*STANDBY), lost) == outcome


def test_death_of_a_node_ends_a_run_in_which_none_stands_by() -> None:
    job = local_job("resilience/checkpointless=default", "resources.shm_gib=1")
    assert decide_outcome(Happened(ended={"node-1": 137}), job) == outcome_of("node-1", 137)


def test_run_outlives_a_node_that_another_stood_in_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    (tmp_path / "node-2.sh").write_text(f"cd '{tmp_path}' && read < up\n")

    status, shown = run_scripts(tmp_path, "true", "echo > up; kill -KILL $$", overrides=STANDBY)

    assert status == 0
    assert "node-1 was killed; the run goes on with " in shown
    assert last_event(tmp_path)[1] == {
        "exit_status": 0,
        "reason": "all nodes succeeded but node-1, without which the run went on",
    }


def test_full_folder_of_a_run_that_goes_on_is_said_and_shown_by_status(tmp_path: Path) -> None:
    """Its events have gaps, and it looks as if no step came."""
    with open_disk(tmp_path / "disk", tmp_path / "image"):
        run_dir = tmp_path / "disk" / "run"
        for script, is_full in (("true", False), ("cat /dev/zero >fill; true", True)):
            status, said = run_scripts(run_dir, script)
            told = launch("status", str(run_dir), folder=tmp_path).out
            assert status == 0
            assert (f"[launcher] the disk of {run_dir} is full: events and" in said) == is_full
            assert (f"  folder    {run_dir}, whose disk is full\n" in told) == is_full


def test_full_folder_is_named_whichever_node_failed_for_it(tmp_path: Path) -> None:
    with open_disk(tmp_path / "disk", tmp_path / "image"):
        run_dir = tmp_path / "disk" / "run"
        os.mkfifo(tmp_path / "full")

        status, said = run_scripts(
            run_dir,
            f"cat /dev/zero >fill; echo >../../full; {FOREVER}",
            "read <../../full; exit 1",
        )

    assert status == 1
    assert f"run.dir {run_dir} takes nothing more: No space left on device; make room" in said
