"""What an agent and its workers write: the console, a file for each rank and generation, events.

Each destination has a writer of its own, so none of them holds up the agent or another one.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import BinaryIO

from resilience.agent.operator.kubeflow import ProgressTeller, take_server
from resilience.agent.processes.writer import Piece, Writer
from resilience.events import EventFile, EventLog, EventLogError
from resilience.plain_files import open_linkless
from resilience.whole_files import draft_of, write_first

_CHUNK_BYTES = 1 << 16
_LINE_BYTES_MAX = 1 << 20
_NOTICE_S = 1.0
"""After so long an agent that has ended says that it waits for its folder."""
_LAST_TELL_S = 5.0
"""Seconds that a run which has ended well waits until its last step is told; any other, 1 s."""
_RETRY_S = 5.0
"""Before events are written again where the file took none."""
_CONSOLE_DEADLINE_S = 5.0
"""How long a console that nobody reads can hold up the agent's end."""


class WorkerStream(Enum):
    """What a worker writes to its agent."""

    OUTPUT = 1
    ERRORS = 2
    EVENTS = 3


class Console:
    """The standard output and error of an agent, for itself and its workers."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._output = Writer(partial(self._write, 1))
        self._errors = Writer(partial(self._write, 2))

    def say(self, text: str) -> None:
        """Tell whoever looks after the run what the agent does; never dropped."""
        lines = (f"resilience.agent {self._node}: {line}" for line in text.splitlines())
        self.show("\n".join(lines))

    def show(self, text: str) -> None:
        """Print a text as it is; never dropped."""
        self._errors.put(Piece(lines=f"{text.rstrip()}\n".encode(errors="backslashreplace")))

    def print(self, who: str, lines: Sequence[bytes], stream: WorkerStream) -> None:
        """Print a worker's lines, unless too many wait."""
        prefix = f"[{self._node} {who}] ".encode()
        piece = Piece(lines=b"".join(prefix + line + b"\n" for line in lines), is_kept=False)
        (self._errors if stream is WorkerStream.ERRORS else self._output).put(piece)

    def close(self) -> None:
        """Write what waits, in a bounded time."""
        deadline_s = time.monotonic() + _CONSOLE_DEADLINE_S
        for each in (self._output, self._errors):
            each.close(deadline_s)

    def _write(self, number: int, piece: Piece) -> None:
        text = piece.lines
        if piece.num_dropped:
            text = (
                f"resilience.agent {self._node}: {piece.num_dropped} lines of workers are left out "
                "here: nobody read them in time\n"
            ).encode()
        with suppress(OSError):  # whoever read it has gone; the files go on
            while text:
                try:
                    text = text[os.write(number, text) :]
                except BlockingIOError:
                    select.select([], [number], [])


class LogFolder:
    """Where a node's workers' lines go. A folder that takes no more is said once, and left."""

    def __init__(self, path: Path, console: Console) -> None:
        self._path = path
        self._console = console
        self._files: dict[str, BinaryIO] = {}
        self._is_broken = False
        self._writer = Writer(self._write)

    def prepare(self) -> None:
        """Make the folder; raises OSError where nothing can be written there."""
        self._path.mkdir(parents=True, exist_ok=True)
        write_first(probe := draft_of(self._path / "probe", str(os.getpid())), {}, "")
        probe.unlink()

    def error_path(self, number: int) -> Path:
        """Return where a worker may write how it failed, as programs of torchrun do."""
        return (self._path / f"error-{number}.json").absolute()

    def write(self, rank: int | None, generation: int, lines: Sequence[bytes]) -> None:
        """Write whole lines to the file of the rank and generation, unless too many wait."""
        name = "spare.log" if rank is None else f"rank-{rank}.generation-{generation}.log"
        text = b"".join(line + b"\n" for line in lines)
        self._writer.put(Piece(file=name, lines=text, is_kept=False))

    def close(self, deadline_s: float) -> int:
        """Write what waits until then; returns how many lines are not written."""
        if not (num_left := self._writer.close(deadline_s)):
            self._close_files()
        return num_left

    def _write(self, piece: Piece) -> None:
        if self._is_broken:
            return
        text = piece.lines
        if piece.num_dropped:
            missing = f"{piece.num_dropped} lines of workers are left out here"
            why = "the file took nothing for too long"
            self._console.say(f"in {self._path / piece.file} {missing}: {why}")
            text = f"resilience.agent: {missing}: {why}\n".encode()
        try:
            self._open(piece.file).write(text)
        except OSError as error:
            self._is_broken = True
            self._console.say(f"no more logs in {self._path}: {error}; the run goes on")

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) >= 64:
                self._close_files()
            path = self._path / name
            self._files[name] = open(path, "ab", buffering=0, opener=open_linkless)  # noqa: SIM115
        return self._files[name]

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class EventQueue:
    """The log of a run as an agent writes it, for itself and its workers: no event is dropped.

    Where the file takes nothing, as on a full disk, events wait until it does.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        """Open the file; `complain` is told of the first event that has to wait."""
        self._path = path
        self._complain = complain
        self._has_complained = False
        self._file = EventFile(path)
        self._closing = threading.Event()
        self._num_lost = 0
        self._writer = Writer(self._write)
        self._callback: Callable[[bytes], None] | None = None

    def watch(self, callback: Callable[[bytes], None]) -> None:
        """Call `callback` with each further line, before the line is written."""
        self._callback = callback

    def append(self, line: bytes) -> None:
        """Have a whole line written."""
        if self._callback:
            self._callback(line)
        self._writer.put(Piece(lines=line))

    def close(self, deadline_s: float = 0.0) -> int:
        """Write what waits until then; returns how many events are not written."""
        self._closing.set()
        return self._writer.close(deadline_s) + self._num_lost

    def _write(self, piece: Piece) -> None:
        while True:
            is_last = self._closing.is_set()
            try:
                self._file.append(piece.lines)
            except EventLogError as error:
                if not self._has_complained:
                    self._has_complained = True
                    self._complain(f"{error}; the run goes on, and its events wait in memory")
            else:
                return
            if is_last:
                self._num_lost += piece.lines.count(b"\n")
                return
            self._closing.wait(_RETRY_S)
            # What was opened before a file server's failover may be stale for ever.
            with suppress(OSError):
                file = EventFile(self._path, is_there=True)
                self._file.close()
                self._file = file


class Output:
    """All that an agent writes, for itself and its workers; it waits for none of it."""

    def __init__(self, events: Path, logs: Path, node: str) -> None:
        """Open all; OSError where the file `events` or the folder `logs` takes nothing."""
        self._node = node
        self._path = events
        self.console = Console(node)
        self.logs = LogFolder(logs, self.console)
        self.logs.prepare()
        # A full disk is no reason to stop a run that survives without its record.
        self._events = EventQueue(events, self.console.say)
        self._progress: ProgressTeller | None = None

    def tell_progress(self, variables: MutableMapping[str, str], num_steps: int | None) -> None:
        """Tell steps, of so many in the whole run, to the server that variables name; None: not."""
        if num_steps is not None and (server := take_server(variables)):
            self._progress = ProgressTeller(server, num_steps, self.console.say)
            self._events.watch(self._progress.note)

    def open_log(self) -> EventLog:
        """Return the log for the agent's own events."""
        return EventLog(self._path, node=self._node, rank=None, generation=-1, sink=self._events)

    def write(
        self, rank: int | None, generation: int, lines: Sequence[bytes], stream: WorkerStream
    ) -> None:
        """Have a worker's whole lines written where those of the stream go."""
        if stream is WorkerStream.EVENTS:
            for line in lines:
                self._events.append(line + b"\n")
        elif lines:
            self.console.print("spare" if rank is None else f"rank {rank}", lines, stream)
            self.logs.write(rank, generation, lines)

    def close(self, patience_s: float) -> None:
        """Write what still waits, for a bounded time, and say what could not be written."""
        folder, start_s = self._path.parent, time.monotonic()
        notice_s = start_s + min(_NOTICE_S, patience_s)
        if num_lines := self._events.close(notice_s) + self.logs.close(notice_s):
            self.console.say(f"waits up to {patience_s:g} s for {folder} to take {num_lines} lines")
        for kind, close in (("events", self._events.close), ("lines of workers", self.logs.close)):
            if num_lines := close(start_s + patience_s):
                self.console.say(f"{num_lines} {kind} are lost: {folder} took none of them")
        if self._progress:
            self._progress.close(min(_LAST_TELL_S, patience_s / 5))
        self.console.close()


class LineCutter:
    """Cuts what a pipe delivers into lines, which also end where a bar returns to their begin."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.read_s = 0.0
        """When something came last, by the monotonic clock."""
        self._rest = b""
        os.set_blocking(file, False)

    def read(self) -> tuple[list[bytes], bool]:
        """Return the whole lines that are there, and whether more may come."""
        try:
            data = os.read(self.file, _CHUNK_BYTES)
        except BlockingIOError:
            return [], True
        if not data:
            rest, self._rest = self._rest, b""
            return ([rest] if rest else []), False
        self.read_s = time.monotonic()
        data, end = self._rest + data, b""
        if b"\r" in data:
            # Of the last one it is not known yet whether a newline follows.
            data, end = (data[:-1], b"\r") if data.endswith(b"\r") else (data, b"")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = data.split(b"\n")
        self._rest += end
        if len(self._rest) > _LINE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        return lines, True

    def drain(self) -> list[bytes]:
        """Return all that is left in the pipe of a worker that has ended, and close it."""
        data = self._rest
        while True:
            try:
                more = os.read(self.file, _CHUNK_BYTES)
            except BlockingIOError:
                # Something that the worker started holds the pipe; its owner is gone.
                break
            if not more:
                break
            data += more
        os.close(self.file)
        return data.splitlines()
