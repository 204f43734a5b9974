"""What keeps a daemon running beside the agent, with small daemons of the test's own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.clusters import beside

TIMEOUT_S = 60.0
DAEMON = """
import os, signal, sys
numbers = (signal.SIGTERM, signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("up", os.getpid(), flush=True)
print("got", signal.Signals(signal.sigwait(numbers)).name, flush=True)
"""
Started = subprocess.Popen[str]


@pytest.fixture
def keep() -> Iterator[Callable[[str], Started]]:
    """Return what starts a keeper of a daemon in Python."""
    running: list[Started] = []

    def start(daemon: str) -> Started:
        running.append(subprocess.Popen(
            [sys.executable, "-m", "launcher.clusters.beside", sys.executable, "-c", daemon],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            bufsize=1, cwd=Path(__file__).parents[2],
        ))  # fmt: skip
        return running[-1]

    yield start
    for process in running:
        with process:
            process.kill()


def line(process: Started) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    assert ready, "nothing was said"
    return process.stdout.readline().strip()


def pid_of(process: Started) -> int:
    word, number = line(process).split()
    assert word == "up"
    return int(number)


def order(process: Started, text: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()


@pytest.mark.parametrize(("text", "expected"), [("", "SIGTERM"), ("remove\n", "SIGUSR1")])
def test_order_says_whether_anything_stays(
    keep: Callable[[str], Started], text: str, expected: str
) -> None:
    process = keep(DAEMON)
    pid_of(process)

    order(process, text)

    assert line(process) == f"got {expected}"
    assert process.wait(TIMEOUT_S) == 0


def test_daemon_that_was_killed_is_started_again(keep: Callable[[str], Started]) -> None:
    process = keep(DAEMON)
    first = pid_of(process)

    os.kill(first, signal.SIGKILL)

    assert pid_of(process) != first
    order(process)
    assert line(process) == "got SIGTERM"
    assert process.wait(TIMEOUT_S) == 0


def test_signals_of_a_cluster_leave_the_daemon_alone(keep: Callable[[str], Started]) -> None:
    process = keep(DAEMON)
    pid_of(process)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
    order(process)

    assert line(process) == "got SIGTERM"
    assert process.wait(TIMEOUT_S) == 0


def test_daemon_ends_with_a_keeper_that_is_killed(keep: Callable[[str], Started]) -> None:
    process = keep(DAEMON)
    pid_of(process)

    process.kill()

    assert line(process) == "got SIGTERM"


def test_command_that_is_wrong_is_not_tried_again(keep: Callable[[str], Started]) -> None:
    process = keep("import sys; sys.exit(2)")

    assert process.wait(TIMEOUT_S) == 2


def test_order_ends_the_pause_before_the_next_start(keep: Callable[[str], Started]) -> None:
    process = keep("import sys; print('up', 1, flush=True); sys.exit(1)")
    pid_of(process)
    order(process)

    assert process.wait(TIMEOUT_S) == 0


DIES_ON_REMOVE = """
import os, signal, sys
numbers = (signal.SIGTERM, signal.SIGUSR1)
print("up", os.getpid(), flush=True)
number = signal.sigwait(numbers)
print("got", signal.Signals(number).name, *sys.argv[1:], flush=True)
sys.exit(0 if sys.argv[1:] else 1)
"""


def test_remove_reaches_a_daemon_that_is_just_starting(keep: Callable[[str], Started]) -> None:
    """Nothing blocks its signals but what starts it."""
    process = keep("import os, signal; print('up', os.getpid(), flush=True)\n"
                   "print('got', signal.sigwait([signal.SIGUSR1]).name, flush=True)")  # fmt: skip
    order(process, "remove\n")

    pid_of(process)
    assert line(process) == "got SIGUSR1"
    assert process.wait(TIMEOUT_S) == 0


def test_remove_starts_a_daemon_once_more_where_the_last_one_died(
    keep: Callable[[str], Started],
) -> None:
    process = keep(DIES_ON_REMOVE)
    first = pid_of(process)
    order(process, "remove\n")
    assert line(process) == "got SIGUSR1"

    assert pid_of(process) != first
    assert line(process) == "got SIGUSR1 --remove-on-exit"
    assert process.wait(TIMEOUT_S) == 0


def test_remove_between_two_starts_is_not_lost(keep: Callable[[str], Started]) -> None:
    process = keep("import sys\nif '--remove-on-exit' in sys.argv: print('removed', flush=True)\n"
                   "else: print('up', 1, flush=True); sys.exit(1)")  # fmt: skip
    pid_of(process)
    order(process, "remove\n")

    assert line(process) == "removed"
    assert process.wait(TIMEOUT_S) == 0


def test_command_that_does_not_exist_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.clusters.beside", "/absent/python", "-m", "memoryd"],
        stdin=subprocess.PIPE, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr == "beside: cannot start '/absent/python': No such file or directory\n"


def test_daemon_that_never_lives_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_PAUSE_S", 0.0)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    read, write = os.pipe()
    with os.fdopen(read) as silent, os.fdopen(write, "wb"):
        monkeypatch.setattr(sys, "stdin", silent)

        assert beside.main(["false"]) == 1
