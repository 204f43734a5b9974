"""The process that owns everything one node of a local run starts.

    python -I -S keeper.py GRACE_S COMMAND...

A program of its own that imports the standard library alone. It runs COMMAND
and ends with its exit status (128 and the signal's number for one that a
signal ended) once nothing that COMMAND started is left, in whatever session,
but for what SIGKILL does not end.

The end of standard input asks for the node's end: SIGTERM to COMMAND's process
group, and GRACE_S seconds later SIGKILL to all of it. A launcher that dies
closes the pipe as well, so there is no way for a node to outlive its launcher.
SIGTERM to this process asks for the SIGKILL at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

END_DEADLINE_S = 30.0
"""What SIGKILL has not ended by then is in the kernel's hands, or a driver's: nobody can wait."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Run one node to its end and return its exit status."""
    grace_s, command = float(arguments[0]), arguments[1:]
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    # What loses its parent becomes our child instead of init's, so that we can end it.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    node = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509  this process has one thread
    )
    _wait_for_end(node.pid, wake, grace_s)
    return _end_all(node.pid)


def _wait_for_end(node: int, wake: int, grace_s: float) -> None:
    """Return when the node has ended or has to be ended with force."""
    ended, standard_input = os.pidfd_open(node), sys.stdin.fileno()
    with selectors.DefaultSelector() as selector:
        for file in (ended, wake, standard_input):
            selector.register(file, selectors.EVENT_READ)
        ready = {key.fd for key, _ in selector.select()}
        if ready & {ended, wake}:
            return
        os.killpg(node, signal.SIGTERM)
        selector.unregister(standard_input)
        selector.select(grace_s)


def _end_all(node: int) -> int:
    """Kill and collect all children until there are none; return the node's exit status.

    A child's own children become ours when it is gone, so the next round has them.
    """
    status = 128 + signal.SIGKILL
    deadline_s = time.monotonic() + END_DEADLINE_S
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
        if not _await_end(children, deadline_s - time.monotonic()):
            sys.stderr.write(f"keeper: not ended by SIGKILL, and left: processes {children}\n")
            return status
        for child in children:
            pid, wait_status = os.waitpid(child, os.WNOHANG)
            if pid == node:
                status = shell_status(os.waitstatus_to_exitcode(wait_status))
    return status


def _await_end(children: Sequence[int], timeout_s: float) -> bool:
    """Return whether one of them has ended in time."""
    poll = select.poll()
    files = [os.pidfd_open(child) for child in children]
    for file in files:
        poll.register(file, select.POLLIN)
    ended = poll.poll(max(0.0, timeout_s) * 1000)
    for file in files:
        os.close(file)
    return bool(ended)


def shell_status(exit_code: int) -> int:
    """Return the status that a shell gives for a process's end, which is -N by signal N."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def _children() -> list[int]:
    """Return the processes whose parent is this one, those that ended among them."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field is the program's name, which may hold anything.
            fields = path.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            children.append(int(path.parent.name))
    return children


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, the keeper, dies."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl option {option}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
