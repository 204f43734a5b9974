"""The process that forks workers, as the agent has it: it is started, asked and replaced."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.agent.processes.worker import describe_status, state_of
from resilience.inprocess.handles import AGENT_PID, WorkerHandles
from resilience.node_config import ProgramConfig

_ZYGOTE = "resilience.agent.processes.zygote"
_PR_SET_CHILD_SUBREAPER = 36
_END_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What workers run, and what they inherit."""

    command: tuple[str, ...]
    """`-m MODULE ...` or `SCRIPT ...`."""
    preload: tuple[str, ...]
    warm: str
    """How far spares come: imports, or program (up to its block)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the environment of each says beside its rank."""
    handles: WorkerHandles
    script: ProgramConfig | None = None
    """Of a program of a user's."""
    lock_file: int = -1
    """Held by the agent, the process that forks and all workers; -1 where there is none."""


class ZygoteError(RuntimeError):
    """Workers cannot be started at all; the message says why."""


class ZygoteLostError(ZygoteError):
    """The process that forks workers is gone; another one may do."""


class ZygoteThreadsError(ZygoteLostError):
    """What it imports starts threads; one that imports nothing does."""


class ZygoteProcess:
    """A process that has imported what workers need, and the socket to it."""

    def __init__(self, program: Program) -> None:
        self.is_ready = False
        """It has imported everything, and forks at once."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handles = program.handles
        shared = (handles.page_file, handles.transfer_file, *handles.state_files)
        files = (*shared, program.lock_file)
        inherited = [file for file in files if file >= 0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _ZYGOTE, str(theirs.fileno()), *program.preload],
            pass_fds=[theirs.fileno(), *inherited],
            stdin=subprocess.DEVNULL,
            # What is imported there may read how many threads it is to have.
            env={**os.environ, **program.variables, AGENT_PID: str(os.getpid())},
        )
        theirs.close()

    def fileno(self) -> int:
        """Return what becomes readable when it says something, or has ended."""
        return self._socket.fileno()

    def ask(self, request: Mapping[str, Any], files: Sequence[int]) -> None:
        """Ask for a worker, which gets the files."""
        with suppress(ConnectionError):  # it has ended: `hear` says why
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)

    def hear(self) -> dict[str, Any]:
        """Return what it says next; raises ZygoteError where it has ended, or cannot begin."""
        data = self._receive()
        if not data:
            raise ZygoteLostError(f"the process that forks workers {self._describe_end()}")
        said: dict[str, Any] = json.loads(data)
        if problem := said.get("problem"):
            raise ZygoteError(problem)
        if threads := said.get("threads"):
            raise ZygoteThreadsError(
                f"no worker can be forked safely beside the threads ({', '.join(threads)}) that "
                "the modules of --preload start; workers import them on their own from now on, "
                "so that a lost one is replaced seconds later"
            )
        self.is_ready = self.is_ready or "is_ready" in said
        return said

    def _receive(self) -> bytes:
        """Return its next message; nothing where it has ended."""
        # Where it has ended with requests unread, that error comes before what it said last.
        for _ in range(2):
            with suppress(OSError):
                return self._socket.recv(1 << 16)
        return b""

    def _describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return describe_status(self._process.wait(timeout=1))
        return "is gone"

    @property
    def pid(self) -> int:
        """Return which process it is."""
        return self._process.pid

    def state(self) -> str:
        """Return the letter of the process's state, empty for one that is gone."""
        return state_of(Path(f"/proc/{self._process.pid}"))

    def kill(self) -> None:
        """Kill it; `hear` tells of that."""
        self._process.kill()

    def close(self) -> None:
        """End it."""
        self._socket.close()
        try:
            self._process.wait(timeout=_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def adopt_orphans() -> None:
    """Make this process the parent of what its children leave when they end.

    So a worker that the zygote has had forked is a child of the agent: it dies with the agent and
    lives on without the zygote.
    """
    # Also where whoever has started us ignores it, which would lose the statuses of children.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel gives this process no orphans")
