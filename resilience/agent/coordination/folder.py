"""What agents tell each other by files in the folder of the run.

Each agent leaves a file there that names its address while it lives: who comes later finds the
others by it, and agents that see each other's know that the folder is one. Half of a generation
goes on only with the record of the next one's number, which the file system gives to one of them.

A file server may stand still: only a thread of its own waits for it, and answers when it can.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue

from pydantic import TypeAdapter

from resilience.agent.coordination.founding import Record, attempt_name, judge
from resilience.agent.coordination.membership import Claimed, Judged
from resilience.state.layout import Layout

_AGENTS = "agents"
_RECORDS = "generations"


Answer = Claimed | Judged


class RunFolder:
    """One agent's view of the folder. Its methods are for the agent's thread and never wait."""

    def __init__(self, path: Path, *, run: str, attempt: int = 0) -> None:
        self.start = secrets.token_hex(8)
        """Name of this start of the agent."""
        self.is_shared = False
        """Whether the coordinator that was followed last sees the same folder."""
        self._path = path
        self._run, self._attempt = run, attempt
        self._name = attempt_name(run, attempt)
        self._record: Record | None = None
        """Under which the run goes on that this agent coordinates."""
        self._seen: Record | None = None
        self._seen_s = time.monotonic()
        """Since when the newest record has been as it is."""
        self._questions: SimpleQueue[Callable[[], Answer | bool | None] | None] = SimpleQueue()
        self._answers: deque[Answer | bool | None] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name="run-folder", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `answers` has something."""
        return self._wake

    def announce(self, address: str) -> None:
        """Let others know of this agent; a folder that takes no file is not shared."""

        def write() -> bool:
            folder = self._path / _AGENTS
            folder.mkdir(exist_ok=True)
            # A mount that cannot link gives no record to anybody: it is nobody's common folder.
            probe = folder / f".{self.start}.probe"
            _write_first(probe, {}, self.start)
            # A file server that fails over may do it twice.
            probe.unlink(missing_ok=True)
            _write_whole(folder / self.start, {"run": self._name, "address": address})
            return True

        self._questions.put(write)

    def look(self, start: str) -> None:
        """Find out whether another agent sees this folder; `is_shared` follows."""
        self._questions.put((self._path / _AGENTS / start).is_file)

    def found(self, agents: tuple[str, ...]) -> None:
        """Try to begin the run with these agents; the answer says whether they may."""

        def write() -> Judged:
            try:
                return begin()
            except (OSError, ValueError) as error:
                return Judged(record=None, reason=f"{self._path} does not answer: {error}")

        def begin() -> Judged:
            newest = self._newest_record()
            if newest != self._seen:
                self._seen, self._seen_s = newest, time.monotonic()
            unchanged_s = time.monotonic() - self._seen_s
            record = judge(
                newest,
                run=self._run,
                attempt=self._attempt,
                newcomers=agents,
                unchanged_s=unchanged_s,
            )
            if isinstance(record, str):
                return Judged(record=None, reason=record)
            path = self._path / _RECORDS / f"run-{record.number}"
            if not _write_first(path, asdict(record), self.start):
                return Judged(record=None, reason="others have begun it")
            self._record = record
            return Judged(record=record)

        self._questions.put(write)

    def renew(self, agents: tuple[str, ...], generation: int, *, is_over: bool = False) -> None:
        """Say who belongs to the run, which generation it has come to, and whether it is over."""

        def write() -> None:
            record = self._record or self._newest_record()
            if record is None or (record.run, record.attempt) != (self._run, self._attempt):
                return
            self._record = replace(
                record,
                agents=agents,
                generation=generation,
                renewal=record.renewal + 1,
                is_over=is_over,
            )
            _write_whole(self._path / _RECORDS / f"run-{record.number}", asdict(self._record))

        self._questions.put(write)

    def _newest_record(self) -> Record | None:
        """Return the last of those who have begun a run in this folder."""
        numbers = [
            int(path.name.partition("-")[2])
            for path in (self._path / _RECORDS).glob("run-*")
            if path.name.partition("-")[2].isdecimal()
        ]
        if not numbers:
            return None
        data = (self._path / _RECORDS / f"run-{max(numbers)}").read_bytes()
        return TypeAdapter(Record).validate_json(data)

    def claim(self, generation: int, layout: Layout) -> None:
        """Ask for the record of a generation's number; the answer says whose it is."""
        path = self._path / _RECORDS / f"{self._name}-{generation}"

        def write() -> Claimed:
            try:
                _write_first(path, asdict(layout), self.start)
                found = TypeAdapter(Layout).validate_json(path.read_bytes())
            except (OSError, ValueError):
                return Claimed(generation=generation, layout=None)
            return Claimed(generation=generation, layout=found)

        self._questions.put(write)

    def answers(self) -> list[Answer]:
        """Return what was found out since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        found: list[Answer] = []
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, bool):
                self.is_shared = answer
            elif answer is not None:
                found.append(answer)
        return found

    def find_agents(self) -> list[str]:
        """Return the addresses of agents of this run that have left word; waits for the disk."""
        found = []
        with suppress(OSError):
            for path in (self._path / _AGENTS).iterdir():
                with suppress(OSError, ValueError, TypeError, KeyError):
                    word = json.loads(path.read_bytes())
                    if word["run"] == self._name:
                        found.append(str(word["address"]))
        return found

    def close(self) -> None:
        """Take this agent's word back, unless the disk stands still."""
        self._questions.put(self._remove)
        self._questions.put(None)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _remove(self) -> bool:
        (self._path / _AGENTS / self.start).unlink(missing_ok=True)
        return False

    def _work(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                self._answers.append(question())
            except (OSError, ValueError, TypeError):
                # Who cannot write or read here shares nothing.
                self._answers.append(False)
            os.eventfd_write(self._wake, 1)


_CLOSE_S = 2.0


def _write_whole(path: Path, data: dict[str, object]) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(json.dumps(data), "utf-8")
    draft.replace(path)


def _write_first(path: Path, data: dict[str, object], start: str) -> bool:
    """Write a file that stays as it is; returns whether it was not there before."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.{start}")
    draft.write_text(json.dumps(data), "utf-8")
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True
