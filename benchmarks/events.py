"""The log of events that every process of a benchmarked job writes and the driver reads.

One file of JSON lines per process. Times are CLOCK_MONOTONIC, which all processes of a Linux
machine share. Words: started, imported, joined, grouped, restored, committed, discarded, faulted,
merged, woken, finished, rescued.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in one process at `at_s`; the rest depends on the word."""

    at_s: float
    word: str
    rank: int
    pid: int
    values: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step of a committed, discarded, restored or faulted event."""
        return int(self.values["step"])

    @property
    def world(self) -> int:
        """How many ranks took part in a committed step."""
        return int(self.values["world"])


class EventLog:
    """Appends events of this process; each is one write, so a killed process loses none.

    A process forked from one that has written gets a file of its own.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.pid = 0
        self.file = -1

    def write(self, word: str, rank: int, **values: Any) -> None:
        """Append one event with the time of now."""
        at_s = time.monotonic()
        if self.pid != os.getpid():
            self.pid = os.getpid()
            path = Path(self.run_dir, f"measured-{self.pid}.jsonl")
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        line = {"at_s": at_s, "word": word, "rank": rank, "pid": self.pid, **values}
        os.write(self.file, json.dumps(line).encode() + b"\n")


def parse_event(line: str) -> Event:
    """Parse one line of a log."""
    values = json.loads(line)
    return Event(
        values.pop("at_s"), values.pop("word"), values.pop("rank"), values.pop("pid"), values
    )


class EventReader:
    """Reads all logs of a run folder bit by bit; half-written last lines wait for their rest."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = Path(run_dir)
        self.offsets: dict[Path, int] = {}
        self.events: list[Event] = []

    def read_new(self) -> list[Event]:
        """Return what came since the last call, by time, and remember it in `events`."""
        fresh: list[Event] = []
        for path in self.run_dir.glob("measured-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self.offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self.offsets[path] = self.offsets.get(path, 0) + len(whole) + len(newline)
            fresh += [parse_event(line) for line in whole.decode().splitlines()]
        fresh.sort(key=lambda event: event.at_s)
        self.events = sorted(self.events + fresh, key=lambda event: event.at_s)
        return fresh
