"""What /proc tells about processes that may end at any moment."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LIMIT_S = 120.0
"""What takes longer hangs."""


def parents() -> dict[int, int]:
    """Return the parent of every process that is there."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> set[int]:
    """Return a process's children, their children, and so on."""
    parent_of = parents()
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parent_of.items() if parent in new}
        found |= new
    return found


def kill_family(pid: int) -> set[int]:
    """Kill a process and its descendants, among them those that others start meanwhile.

    They stand still before the first is killed: whoever keeps another one alive would start it
    again. Returns all of them, some of which may not have ended yet.
    """
    family: set[int] = set()
    while new := {pid, *descendants(pid)} - family:
        for each in new:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)
        family |= new
    for each in family:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return family


def command_of(pid: int) -> bytes:
    """Return a process's words, each with a zero byte behind it; nothing if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def processes_with(*variables: str, word: str = "") -> list[int]:
    """Return the processes that have these variables, as NAME=VALUE, and a word in their command.

    The numbers are sorted. A process has the variables of the one that has started it.
    """
    wanted = {each.encode() for each in variables}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                found.append(int(path.name))
    return [pid for pid in sorted(found) if word.encode() in command_of(pid)]


def stop(pid: int) -> None:
    """Stop a process, and return when it has stopped: until then it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    except ChildProcessError:
        # It was forked elsewhere, and its parent alone is told.
        end_s = time.monotonic() + LIMIT_S
        while any(state not in "tTZX" for state in _states(pid)):
            assert time.monotonic() < end_s, f"process {pid} does not stop: {_states(pid)}"
            time.sleep(0.001)
        assert _states(pid), f"process {pid} has ended"


def _states(pid: int) -> list[str]:
    """Return the state of each thread of a process, as /proc has it."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            found.append(path.read_text().rpartition(")")[2].split()[0])
    return found


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process do nothing within the block."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for_end(pid: int) -> None:
    """Return when a process, perhaps not one of our own children, has ended."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended = select.select([file], [], [], LIMIT_S)[0]
        assert ended, f"process {pid} does not end: {command_of(pid)!r}"
    finally:
        os.close(file)


@contextmanager
def sent(file: int, signals: list[tuple[float, signal.Signals]]) -> Iterator[None]:
    """Have signals sent to a process, each after its seconds, within the block."""

    def send(number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(file, number)

    with ExitStack() as stack:
        for seconds, number in signals:
            timer = threading.Timer(seconds, send, (number,))
            stack.callback(timer.join)
            timer.start()
        yield
