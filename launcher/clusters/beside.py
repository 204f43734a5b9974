"""Keeps a daemon running beside a node's agent, until the node's script says how it ends.

    python -m launcher.clusters.beside COMMAND...

It starts COMMAND, which is memoryd's, in a session of its own, and again when it has ended, but
for exit status 2, which says that the command itself is wrong: then it ends with that status.
Ten in a row that end at once are the last, too: exit status 1. Standard input is the order to
end: a line `remove` sends SIGUSR1, after which nothing is left of the daemon, even of one that
had just died; the end of the input alone sends SIGTERM, after which the next daemon finds what
this one kept. Since a script that is killed closes its end, too, no daemon outlives its node's
script.

Signals end nothing here: those of a cluster are meant for the agent, which may still need the
daemon. Imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

_PAUSE_S = 1.0
"""Between the end of a daemon and its next start."""
_SHORT_S = 5.0
_SHORT_LIVES_MAX = 10
"""So many daemons in a row that lived no longer: another one would not, either."""
_END_S = 65.0
_REMOVE_S = 165.0
"""How long a daemon may take to end, with what it has to bring to the store; it gives up by
itself before."""
_WRONG_COMMAND = 2
_PR_SET_PDEATHSIG = 1
_Daemon = subprocess.Popen[bytes]


def main(command: Sequence[str]) -> int:
    """Keep the daemon until the input ends; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # A handler, unlike to ignore them, is not passed on to the daemon.
        signal.signal(number, lambda number, frame: None)
    num_short = 0
    while True:
        began_s = time.monotonic()
        daemon = _start(command)
        if daemon is None:
            return _WRONG_COMMAND
        if _wait(daemon):
            return _end(command, daemon)
        if daemon.wait() == _WRONG_COMMAND:
            return _WRONG_COMMAND
        num_short = num_short + 1 if time.monotonic() - began_s < _SHORT_S else 0
        if num_short == _SHORT_LIVES_MAX:
            _say(f"{num_short} daemons in a row ended at once, the last with {daemon.returncode}; "
                 "no further one is started")  # fmt: skip
            return 1
        _say(f"the daemon ended with {daemon.returncode}; starting it again")
        if _has_order(_PAUSE_S):
            return _end(command, None)


def _start(command: Sequence[str]) -> _Daemon | None:
    """Start a daemon; where there is no such command, say so and return None."""
    if not command:
        _say("no command is given")
        return None
    parent = os.getpid()
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prepare(parent),  # noqa: PLW1509  this process has one thread
        )
    except OSError as error:
        _say(f"cannot start {command[0]!r}: {error.strerror}")
        return None


def _wait(daemon: _Daemon) -> bool:
    """Return whether there is an order, once there is one or the daemon has ended."""
    ended = os.pidfd_open(daemon.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for file in (ended, sys.stdin.fileno()):
                selector.register(file, selectors.EVENT_READ)
            return any(key.fd != ended for key, _ in selector.select())
    finally:
        os.close(ended)


def _has_order(timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def _end(command: Sequence[str], daemon: _Daemon | None) -> int:
    """Carry the order out, where the daemon is dead as well."""
    # The order is one short write, or none before the end.
    if os.read(sys.stdin.fileno(), 64).strip() != b"remove":
        status = _stop(daemon, signal.SIGTERM, time.monotonic() + _END_S) if daemon else 0
        return 1 if status == -signal.SIGKILL else 0
    end_s = time.monotonic() + _REMOVE_S
    if daemon and _stop(daemon, signal.SIGUSR1, end_s) == 0:
        return 0
    if time.monotonic() >= end_s:
        return 1
    # What a daemon that died has kept, only another one can take away.
    last = _start([*command, "--remove-on-exit"])
    return 1 if last is None or _stop(last, signal.SIGUSR1, end_s) else 0


def _stop(daemon: _Daemon, number: signal.Signals, end_s: float) -> int:
    """End a daemon; returns its exit status."""
    daemon.send_signal(number)
    try:
        return daemon.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        _say("the daemon did not end in time, and was killed")
        daemon.kill()
        return daemon.wait()


def _prepare(parent: int) -> None:
    """Have the kernel end this process when its parent dies: what it keeps stays.

    The daemon waits for its signals; one that comes before it does so must not kill it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)


def _say(text: str) -> None:
    sys.stderr.write(f"beside: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
