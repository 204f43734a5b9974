"""One worker process, as its agent has it: a child of the agent, whoever has forked it."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from resilience.agent.processes.output import LineCutter, WorkerStream
from resilience.comm.messages import (
    CLOSED_CONNECTION,
    OTHER_SHARD_STATUS,
    Break,
    LineReader,
    Message,
    Open,
    encode,
)

_MESSAGE_BYTES = 1 << 16
_UNSENT_BYTES_MAX = 1 << 28
"""Many threads of a worker may ask for one large value."""
_WORDS_MAX = 500
_WORD = re.compile(rb"[\w\x80-\xff]")
# torch may begin each line of a traceback with the worker's rank.
_FRAME = re.compile(rb"(\[rank\d+\]:)?\s\s")
_NUM_AFTER_MAX = 16
"""Of an exception's further lines, and of what libraries say while the process ends."""
_ENDED_STATES = ("Z", "X")


@dataclass(eq=False, kw_only=True)
class Worker:
    """One process: a rank of the open generation, or a spare."""

    number: int
    slot: int
    socket: socket.socket
    outputs: dict[WorkerStream, LineCutter]
    pid: int = -1
    end_file: int = -1
    """Becomes readable when the process has ended."""
    local_rank: int | None = None
    rank: int | None = None
    generation: int = -1
    shard: str | None = None
    """That of the generation that was opened to it last."""
    has_other_shard: bool = False
    """It is not the one that the process had before, so the process ends."""
    wanted_s: float = float("inf")
    """Since when the process has run and somebody waits for it."""
    is_ready: bool = False
    """The program has reached its block."""
    is_attached: bool = False
    """The program has a block, so it can stop and report."""
    is_condemned: bool = False
    """The agent has ended it on purpose."""
    killed_s: float = float("inf")
    """When it was sent SIGKILL first."""
    is_patient: bool = False
    """It runs only where nobody else wants to, until it has a rank."""
    within: int | None = None
    """The generation that it was sent into, until it has told that it has left it."""
    is_finished: bool = False
    """Its block has returned."""
    is_done: bool = False
    """And nothing that anybody needs comes after it."""
    is_ended: bool = False
    status: int | None = None
    text: str = ""
    """Why there never was a process."""
    last_words: str = ""
    num_after: int = _NUM_AFTER_MAX
    """Lines of its stderr since the last traceback; -1 within one."""
    """The last line of its errors that is no ruler."""
    has_lost_peer: bool = False
    """Whether its errors speak of a connection that a peer has closed."""
    reader: LineReader = field(default_factory=LineReader)
    unsent: bytearray = field(default_factory=bytearray)
    """Bytes of messages that the worker has not taken yet."""

    def send(self, message: Message) -> None:
        """Tell the worker something; one that is gone is noticed by its end.

        One that does not listen while much is said to it is ended.
        """
        self.unsent += encode(message)
        self.flush()
        if len(self.unsent) > _UNSENT_BYTES_MAX:
            self.signal(signal.SIGKILL)

    def flush(self) -> None:
        """Send what the worker takes now."""
        try:
            while self.unsent:
                with memoryview(self.unsent) as view:
                    num_sent = self.socket.send(view, socket.MSG_DONTWAIT)
                del self.unsent[:num_sent]
        except BlockingIOError:
            return
        except OSError:
            self.unsent.clear()

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
        except ValueError as error:
            # Nothing that it says can be believed any more.
            self.last_words = f"its agent cannot read its message: {error}"[:_WORDS_MAX]
            self.signal(signal.SIGKILL)
            return None

    def note_process(self, pid: int) -> None:
        """Note which process it is; one that was to be ended before it began ends now."""
        self.pid, self.end_file = pid, os.pidfd_open(pid)
        if not self.is_patient:
            self.wanted_s = time.monotonic()
        if self.outlives_kill(0.0):
            self.signal(signal.SIGKILL)

    def note_unforked(self, text: str) -> None:
        """Note why there is no process, and never was one."""
        self.is_ended, self.text = True, text

    def bury(self) -> None:
        """Take the status of a process that has ended, and end what it has left.

        That would hold memory, ports and accelerators.
        """
        # While nobody has taken the status, no other process can have the number.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.is_ended = True
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        else:
            self.text = "ended, in what way its debugger knows"

    def outlives_kill(self, deadline_s: float) -> bool:
        """Return whether it was sent SIGKILL so long ago: what still lives does not end by it."""
        return time.monotonic() - self.killed_s >= deadline_s

    def describe_stuck(self) -> str:
        """Return what the threads of a process that does not end are in, for a person."""
        found = set()
        with suppress(OSError):
            for thread in Path(f"/proc/{self.pid}/task").iterdir():
                state = state_of(thread)
                if state and state not in _ENDED_STATES:
                    place = (thread / "wchan").read_text().strip()
                    is_known = place not in ("", "0")
                    found.add(f"state {state} in {place}" if is_known else f"state {state}")
        return ", ".join(sorted(found)) or "no thread of it is left"

    def take_place(self, local_rank: int) -> None:
        """Have one of the node's ranks from now on."""
        self.local_rank = local_rank

    def enter(self, rank: int, generation: int, shard: str | None = None) -> None:
        """Have a rank in a generation, in which nothing is finished yet; in an open one a shard."""
        self.rank, self.generation = rank, generation
        self.has_other_shard = shard is not None and self.shard not in (None, shard)
        self.shard = self.shard if shard is None else shard
        self.is_finished = self.is_done = False

    def begin(self, opening: Open) -> None:
        """Have the worker take part in a generation; it leaves an older one first."""
        if self.within is not None:
            reason = f"generation {opening.generation} begins"
            self.send(Break(generation=self.within, reason=reason))
        self.within = opening.generation
        self.send(opening)

    def note_stopped(self, generation: int) -> None:
        """Note that it has left a generation; it may have been sent into the next one since."""
        if generation == self.within:
            self.within = None

    def note_ready(self, *, has_block: bool) -> None:
        """Note that the process is warm, or that its program has come to a block."""
        self.is_ready = True
        self.is_attached = self.is_attached or has_block

    def note_finished(self, *, is_done: bool) -> None:
        """Note that its block has returned, and whether the program has nothing more to do."""
        self.is_finished, self.is_done = True, is_done

    def signal(self, number: int) -> None:
        """Send a signal to the worker and what it started; once to each."""
        if number == signal.SIGKILL:
            self.killed_s = min(self.killed_s, time.monotonic())
        if self.pid > 0 and not self.is_ended:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(self.pid, number)
                    return

    def state(self) -> str:
        """Return the letter of the process's state (T is stopped), empty for one that is gone."""
        return state_of(Path(f"/proc/{self.pid}"))

    def condemn(self, number: int) -> None:
        """End the worker on purpose: its death is no fault of its own."""
        self.is_condemned = True
        self.signal(number)

    def note_errors(self, lines: Sequence[bytes]) -> None:
        """Keep of what the worker has written to its stderr what tells of its end."""
        self.has_lost_peer |= any(CLOSED_CONNECTION.encode() in line for line in lines)
        for line in filter(_WORD.search, lines):
            if b"Traceback (most recent call last):" in line:
                self.num_after = -1
            elif self.num_after >= 0 or not _FRAME.match(line):
                self.num_after += 1
            if not 0 < self.num_after <= _NUM_AFTER_MAX:
                self.last_words = line.strip().decode(errors="replace")[:_WORDS_MAX]

    def take_turn(self) -> None:
        """Let a spare that has warmed up behind everybody else run as all others do."""
        if self.is_patient:
            self.is_patient, self.wanted_s = False, time.monotonic()
            own = os.getpriority(os.PRIO_PROCESS, 0)
            with suppress(OSError):
                for thread in Path(f"/proc/{self.pid}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), own)

    @property
    def end_reason(self) -> str:
        """Return why the coordinator is told that it has ended, as `Failed` has it."""
        is_planned = self.has_other_shard and self.status == OTHER_SHARD_STATUS
        return "other shard" if is_planned else "died"

    def describe_end(self, when: str | None = None) -> str:
        """Return how the process ended, for a person; with `when`, also its own last words."""
        if self.end_reason != "died":
            return "made room for a process of another part of the state"
        how = self.text or "ended" if self.status is None else describe_status(self.status)
        words = f": {self.last_words}" if self.last_words and when is not None else ""
        return f"{how}{when or ''}{words}"


def state_of(folder: Path) -> str:
    """Return the letter of a process's or a thread's state, empty for one that is gone."""
    with suppress(OSError):
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def describe_status(status: int) -> str:
    """Return how a process ended, for a person."""
    if status < 0:
        return f"was killed by {name_signal(-status)}"
    return f"ended with exit status {status}"


def name_signal(number: int) -> str:
    """Return what a signal is called; most of the real-time ones have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
