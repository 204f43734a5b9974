"""What /proc tells about processes that may end at any moment."""

from __future__ import annotations

import os
import select
import signal
import threading
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


def command_of(pid: int) -> bytes:
    """Return a process's words, each with a zero byte behind it; nothing if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def stop(pid: int) -> None:
    """Stop a child, and return when it has stopped: until then it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a child do nothing within the block."""
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
