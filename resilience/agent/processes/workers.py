"""The worker processes of one node: asks the zygote for them, and ends them.

Owns processes, their sockets and their output. What is to be done about a worker that ended is
decided in `agent`.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from resilience.agent.processes.output import LineCutter, Output, WorkerStream
from resilience.agent.processes.steps import StepFinder
from resilience.agent.processes.tree import find_orphans
from resilience.agent.processes.worker import Worker
from resilience.agent.processes.zygote_process import (
    Program,
    ZygoteError,
    ZygoteLostError,
    ZygoteProcess,
    ZygoteThreadsError,
    adopt_orphans,
)
from resilience.inprocess.handles import EVENTS_READER, SLOT
from resilience.inprocess.variables import ERROR_FILE

_LOST_MAX = 3


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

    def __init__(self, program: Program, output: Output, steps: StepFinder) -> None:
        self.workers: dict[int, Worker] = {}
        self._program = program
        self._output, self._steps = output, steps
        self._number = 0
        self._can_renice = _may_renice()
        self._free_slots = list(range(program.handles.num_slots))
        self._left: set[int] = set()
        """Process groups of workers that have ended: what is left of them is ours to bury."""
        adopt_orphans()
        self._zygote = ZygoteProcess(program)
        self._num_lost = 0
        """Zygotes in a row that have ended before they were ready."""

    def fileno(self) -> int:
        """Return what becomes readable when the zygote says something."""
        return self._zygote.fileno()

    @property
    def is_zygote_ready(self) -> bool:
        """Return whether the zygote has imported everything, and has but to fork."""
        return self._zygote.is_ready

    @property
    def zygote(self) -> ZygoteProcess:
        """Return the process that forks now; where it is killed, `read` has it renewed."""
        return self._zygote

    @property
    def newest(self) -> int:
        """Return the number of the worker that was asked for last."""
        return self._number

    def fork(self, *, is_patient: bool = False) -> Worker:
        """Ask for one more worker; its pid comes later.

        A patient one does not slow down those that have a rank.
        """
        if not self._free_slots:
            raise ZygoteError("too many processes of this node do not end; look for state D in ps")
        ours, theirs = socket.socketpair()
        pipes = {stream: os.pipe() for stream in WorkerStream}
        ends = [writing for _, writing in pipes.values()]
        self._number += 1
        worker = Worker(
            number=self._number,
            slot=self._free_slots.pop(0),
            socket=ours,
            outputs={stream: LineCutter(reading) for stream, (reading, _) in pipes.items()},
            is_patient=is_patient and self._can_renice,
        )
        handles, script = self._program.handles, self._program.script
        variables = {
            **self._program.variables,
            **handles.variables(),
            SLOT: str(worker.slot),
            EVENTS_READER: str(pipes[WorkerStream.EVENTS][0]),
            ERROR_FILE: str(self._output.logs.error_path(worker.number)),
        }
        request = {
            "number": worker.number,
            "command": list(self._program.command),
            "script": script.model_dump() if script else None,
            "warm": self._program.warm,
            "environment": variables,
            "is_patient": worker.is_patient,
        }
        self._zygote.ask(request, [theirs.fileno(), *ends])
        theirs.close()
        for file in ends:
            os.close(file)
        self.workers[worker.number] = worker
        return worker

    def read(self) -> Worker | None:
        """Take in what the zygote says; returns the worker that is forked, or cannot be.

        Raises ZygoteLostError where the zygote has ended, and ZygoteError where it cannot begin.
        """
        said = self._zygote.hear()
        if "forked" in said:
            worker = self.workers[said["forked"]]
            worker.note_process(said["pid"])
            return worker
        if "unforked" in said:
            worker = self.workers[said["unforked"]]
            worker.note_unforked(f"could not be started ({said['text']})")
            return worker
        return None

    def renew(self, lost: ZygoteLostError) -> list[Worker]:
        """Start a zygote in the place of a lost one; returns whom that one never forked.

        Those that it has forked live on: they are children of the agent. Raises ZygoteLostError
        where one after the other is lost before it is ready.
        """
        self._num_lost = 0 if self._zygote.is_ready else self._num_lost + 1
        if self._num_lost >= _LOST_MAX:
            raise ZygoteLostError(f"{lost}, {self._num_lost} times before it was ready")
        self._zygote.close()
        if isinstance(lost, ZygoteThreadsError):
            self._program = replace(self._program, preload=())
        self._zygote = ZygoteProcess(self._program)
        unforked = [worker for worker in self.workers.values() if worker.pid < 0]
        for worker in unforked:
            worker.note_unforked(f"could not be started ({lost})")
        return unforked

    def reap(self) -> None:
        """Let go of what ended workers had started: it was killed with them."""
        self._steps.settle(time.monotonic())
        for group in list(self._left):
            try:
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                self._left.discard(group)

    def forget(self, worker: Worker, unregister: Callable[[int], None]) -> None:
        """Close what belongs to a worker that has ended, after its last lines."""
        for stream, output in worker.outputs.items():
            unregister(output.file)
            self.take(worker, output.drain(), stream)
        self._steps.forget(worker)
        unregister(worker.socket.fileno())
        worker.socket.close()
        if worker.pid > 0:
            unregister(worker.end_file)
            os.close(worker.end_file)
            self._left.add(worker.pid)
        del self.workers[worker.number]
        self._free_slots.append(worker.slot)

    def take(self, worker: Worker, lines: Sequence[bytes], stream: WorkerStream) -> None:
        """Have a worker's lines written."""
        if stream is WorkerStream.ERRORS:
            worker.note_errors(lines)
        if stream is not WorkerStream.EVENTS:
            self._steps.read_lines(worker, lines)
        self._output.write(worker.rank, worker.generation, lines, stream)

    def close(self) -> None:
        """End every process that is left, and the zygote."""
        for worker in self.workers.values():
            worker.signal(signal.SIGKILL)
        self._zygote.close()
        self.end_orphans()

    def end_orphans(self) -> None:
        """Kill what workers of a user's program have left, also in sessions of its own.

        For a time at which no worker has a rank. A process may leave others as it is killed.
        """
        workers = self.workers.values()
        if self._program.script is None or any(each.pid < 0 for each in workers):
            return
        known = {self._zygote.pid, *(each.pid for each in workers)}
        while orphans := find_orphans(known):
            for pid in orphans:
                known.add(pid)
                with suppress(OSError):
                    self._left.add(os.getpgid(pid))
                    os.kill(pid, signal.SIGKILL)
