"""The worker processes of one node: asks the zygote for them, and ends them.

Owns processes, their sockets and their output. What is to be done about a
worker that ended is decided in `agent`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.agent.processes.output import LineCutter, LogFolder
from resilience.comm.messages import LineReader, Message, encode
from resilience.inprocess.handles import AGENT_PID, SLOT, WorkerHandles
from resilience.inprocess.variables import ERROR_FILE

_MESSAGE_BYTES = 1 << 16
_SEND_DEADLINE = struct.pack("@ll", 5, 0)
_WORDS_MAX = 500
_ZYGOTE = "resilience.agent.processes.zygote"


@dataclass(eq=False, kw_only=True)
class Worker:
    """One process: a rank of the open generation, or a spare."""

    number: int
    slot: int
    socket: socket.socket
    outputs: list[LineCutter]
    pid: int = -1
    local_rank: int | None = None
    rank: int | None = None
    generation: int = -1
    is_ready: bool = False
    """The program has reached its block."""
    is_attached: bool = False
    """The program has a block, so it can stop and report."""
    is_condemned: bool = False
    """The agent has ended it on purpose."""
    is_patient: bool = False
    """It runs only where nobody else wants to, until it has a rank."""
    is_finished: bool = False
    is_ended: bool = False
    status: int | None = None
    text: str = ""
    """Why there never was a process."""
    last_words: str = ""
    """The last line of its errors."""
    reader: LineReader = field(default_factory=LineReader)

    def send(self, message: Message) -> None:
        """Tell the worker something; one that is gone is noticed by its end.

        One that does not listen, and has not for long, is ended.
        """
        try:
            self.socket.sendall(encode(message))
        except BlockingIOError:
            self.signal(signal.SIGKILL)
        except OSError:
            return

    def read(self) -> list[Message] | None:
        """Return what the worker has said, without waiting; None where it says no more."""
        try:
            data = self.socket.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        try:
            return self.reader.feed(data) if data else None
        except ValueError:
            # Nothing that it says can be believed any more.
            self.signal(signal.SIGKILL)
            return None

    def signal(self, number: int) -> None:
        """Send a signal to the worker and what it started; once to each."""
        if self.pid > 0 and not self.is_ended:
            for kill in (os.killpg, os.kill):
                try:
                    kill(self.pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
                return

    def state(self) -> str:
        """Return the letter of the process's state (T is stopped), empty for one that is gone."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    def condemn(self, number: int) -> None:
        """End the worker on purpose: its death is no fault of its own."""
        self.is_condemned = True
        self.signal(number)

    def note_errors(self, lines: Sequence[bytes]) -> None:
        """Keep the last line of what the worker has written to its stderr."""
        if words := [line.strip() for line in lines if line.strip()]:
            self.last_words = words[-1].decode(errors="replace")[:_WORDS_MAX]

    def take_turn(self) -> None:
        """Let a spare that has warmed up behind everybody else run as all others do."""
        if self.is_patient:
            self.is_patient = False
            own = os.getpriority(os.PRIO_PROCESS, 0)
            with suppress(OSError):
                for thread in Path(f"/proc/{self.pid}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), own)

    def describe_end(self) -> str:
        """Return how the process ended, for a person."""
        return self.text or "ended" if self.status is None else describe_status(self.status)


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


def describe_status(status: int) -> str:
    """Return how a process ended, for a person."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


class ZygoteError(RuntimeError):
    """Workers cannot be started at all; the message says why."""


class ZygoteLostError(ZygoteError):
    """The process that forks workers is gone, and all workers with it; another try may help."""


def _may_renice() -> bool:
    """Return whether this user may take a lower priority back; tried on a thread of its own."""
    allowed = []

    def attempt() -> None:
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice + 1)
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            allowed.append(thread)

    probe = threading.Thread(target=attempt)
    probe.start()
    probe.join()
    return bool(allowed)


class WorkerPool:
    """All worker processes of the node."""

    def __init__(self, program: Program, logs: LogFolder) -> None:
        self.workers: dict[int, Worker] = {}
        self.is_zygote_ready = False
        self._program = program
        self._logs = logs
        self._number = 0
        self._can_renice = _may_renice()
        self._free_slots = list(range(program.handles.num_slots))
        self._zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handles = program.handles
        files = (handles.page_file, handles.transfer_file, *handles.state_files)
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
        """Return what becomes readable when the zygote says something."""
        return self._zygote.fileno()

    def fork(self, *, is_patient: bool = False) -> Worker:
        """Ask for one more worker; its pid comes later.

        A patient one does not slow down those that have a rank.
        """
        if not self._free_slots:
            raise ZygoteError("too many processes of this node do not end; look for state D in ps")
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_DEADLINE)
        pipes = [os.pipe() for _ in range(2)]
        ends = [writing for _, writing in pipes]
        self._number += 1
        worker = Worker(
            number=self._number,
            slot=self._free_slots.pop(0),
            socket=ours,
            outputs=[LineCutter(reading) for reading, _ in pipes],
            is_patient=is_patient and self._can_renice,
        )
        handles = self._program.handles
        variables = {
            **self._program.variables,
            **handles.variables(),
            SLOT: str(worker.slot),
            ERROR_FILE: str(self._logs.error_path(worker.number)),
        }
        request = {
            "number": worker.number,
            "command": list(self._program.command),
            "warm": self._program.warm,
            "environment": variables,
            "is_patient": worker.is_patient,
        }
        with suppress(ConnectionError):  # it has ended: `read` says why
            socket.send_fds(self._zygote, [json.dumps(request).encode()], [theirs.fileno(), *ends])
        theirs.close()
        for file in ends:
            os.close(file)
        self.workers[worker.number] = worker
        return worker

    def read(self) -> list[Worker]:
        """Take in what the zygote says; returns the workers that have ended."""
        data = self._receive()
        if not data:
            raise ZygoteLostError(f"the process that forks workers {self._describe_zygote()}")
        said: dict[str, Any] = json.loads(data)
        if problem := said.get("problem"):
            raise ZygoteError(problem)
        if said.get("is_ready"):
            self.is_zygote_ready = True
        elif "forked" in said:
            self.workers[said["forked"]].pid = said["pid"]
        elif "unforked" in said:
            worker = self.workers[said["unforked"]]
            worker.is_ended, worker.text = True, f"could not be started ({said['text']})"
            return [worker]
        elif "ended" in said:
            for worker in self.workers.values():
                if worker.pid == said["ended"]:
                    # What it has started and left would hold memory, ports and accelerators.
                    with suppress(OSError):
                        os.killpg(worker.pid, signal.SIGKILL)
                    worker.is_ended, worker.status = True, said["status"]
                    return [worker]
        return []

    def _receive(self) -> bytes:
        """Return the zygote's next message; nothing where it has ended."""
        # Where it has ended with requests unread, that error comes before what it said last.
        for _ in range(2):
            with suppress(OSError):
                return self._zygote.recv(1 << 16)
        return b""

    def _describe_zygote(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return describe_status(self._process.wait(timeout=1))
        return "is gone"

    def forget(self, worker: Worker, unregister: Callable[[int], None]) -> None:
        """Close what belongs to a worker that has ended, after its last lines."""
        for output, is_error in zip(worker.outputs, (False, True), strict=True):
            unregister(output.file)
            self.print(worker, output.drain(), is_error=is_error)
        unregister(worker.socket.fileno())
        worker.socket.close()
        del self.workers[worker.number]
        self._free_slots.append(worker.slot)

    def print(self, worker: Worker, lines: Sequence[bytes], *, is_error: bool) -> None:
        """Write a worker's lines."""
        if lines:
            if is_error:
                worker.note_errors(lines)
            self._logs.write(worker.rank, worker.generation, list(lines), is_error=is_error)

    def close(self) -> None:
        """End every process that is left, and the zygote."""
        for worker in self.workers.values():
            worker.signal(signal.SIGKILL)
        self._zygote.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
