"""The event log: the one record of a run, one JSON object a line.

Each node appends to a file of its own beside that of the launcher: file systems such as NFS lose
lines of a file to which several machines append. On a node its agent writes for its workers;
workers without an agent append themselves. A process may die within a line; the next
write on that node then begins on a line of its own, and readers pass over what was
cut short. Nothing here imports torch or a feature.

A float that JSON has no number for is written as the text NaN, Infinity or
-Infinity, so that the file stays valid JSON; `float()` reads all three back.

What workers write:
    every rank    worker_started (pid, world_size), process_group_ready, data_ready,
                  model_ready, worker_finished, worker_failed (message), worker_stopped
    rank 0        step (loss, lr, grad_norm, duration_s, num_samples, start, and the seconds since
                  the step event before that it waited for data and stood still for checkpoints:
                  data_wait_s, blocked_s),
                  non_finite (outcome, loss, grad_norm, ranks, text),
                  checkpoint_started, checkpoint_written (path, num_bytes)
    with batches in shared memory, every rank
                  batches_ready (num_batches), batch_damaged (reason), batch_late (text)
    with checkpointless recovery, every rank
                  rank_stopped (phase), rank_recovered (role, reason, source, num_bytes),
                  rank_resumed, recovery_fallback (reason, source),
                  state_digest (digest), fault_injected (fault_kind, place)
    and rank 0    warning (text)
    with checkpoints in tiers, every rank
                  checkpoint_failed (reason), checkpoint_unreadable (reason),
                  checkpoint_loaded (source, num_bytes, seconds, num_bad)
    and rank 0    checkpoint_saved (num_bytes, seconds, blocked_s), failure_domains (num, wanted),
                  warning (text)
What a node agent writes:
    agent_started (start), node_leaving, node_left, node_joined, node_lost,
    node_ended (node, reason), state_saved (saved_step, place),
    generation_opened (number, world_size), generation_waits (reason),
    nodes_wait (reason, seconds), node_awaited (reason, seconds), worker_replaced (pid),
    fault_detected (reason, text, quiet_s), generation_broken (reason), generation_left (reason),
    code_seen (folder, commit, is_dirty), step (printed; of a program that prints its steps),
    giving_up (reason), gave_up (reason),
    coordinator_replaced (node, lost), warning (text),
    service_lost (service, text), store_failing (store, text), store_well (store),
    step_stored (store)
What the launcher writes:
    run_started (recipe, version, digest, num_nodes, num_devices),
    run_finished (exit_status, reason), node_gone (node, text),
    run_continued (changes), run_branched (run, from_step, changes)
"""

from __future__ import annotations

import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from resilience.event_files import event_files
from resilience.plain_files import open_linkless, open_plain, parse_json

_LINE_BYTES_MAX = 1 << 20
TIME_MAX = 1 << 33
"""Seconds; the calendar of no system ends before it."""
_LINE_START = b'{"time":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run."""

    time: float
    """Unix seconds, by the clock of the node that wrote it."""
    node: str
    rank: int | None
    """None where no single worker is meant."""
    generation: int
    step: int | None
    event: str
    fields: Mapping[str, Any]


class EventLogError(OSError):
    """The event log cannot take an event: the disk is full or gone."""


class EventSink(Protocol):
    """Takes the lines of a log, each of them whole. May be used from several threads."""

    def append(self, line: bytes) -> None:
        """Take a line that ends with a newline."""

    def close(self) -> object:
        """Take nothing more, and let go of what was opened."""


class EventFile:
    """A log's file, to which other processes append as well; each line is a single write.

    Nothing is buffered: what was appended survives the process.
    """

    def __init__(
        self, path: Path, complain: Callable[[str], None] | None = None, *, is_there: bool = False
    ) -> None:
        """Open the file, or make it, unless it has to be there: a log that was removed stays so.

        `complain` is told once of a line that was lost, instead of an error.
        """
        self._path = path
        self._complain = complain
        self._has_complained = False
        flags = os.O_RDWR | os.O_APPEND | (0 if is_there else os.O_CREAT)
        self._file = open_linkless(path, flags)

    def append(self, line: bytes) -> None:
        """Append a whole line.

        Raises EventLogError where the file cannot take it and nobody is there to complain to.
        """
        try:
            self._append(line)
        except OSError as error:
            reason = error.strerror or str(error)
            text = f"cannot write events to {self._path}: {reason}"
            if self._complain is None:
                raise EventLogError(text) from error
            if not self._has_complained:
                self._has_complained = True
                self._complain(f"{text}; the run goes on, and its record has gaps")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, line: bytes) -> None:
        if self._ends_within_line():
            line = b"\n" + line
        num_written = os.write(self._file, line)
        if num_written != len(line):
            raise OSError(f"wrote {num_written} of {len(line)} bytes of an event")

    def _ends_within_line(self) -> bool:
        """Return whether somebody's last line was cut short.

        A line of a living writer may look so for an instant; the empty line
        that follows from it is nothing to a reader.
        """
        size = os.fstat(self._file).st_size
        return size > 0 and os.pread(self._file, 1, size - 1) not in (b"\n", b"")


class EventLog:
    """Writes one process's events, to the log's file or to who writes it for this process.

    May be used from several threads.
    """

    rank: int | None
    """Stands in every event; None where no single worker is meant."""
    generation: int
    """Likewise."""

    def __init__(
        self,
        path: Path,
        *,
        node: str,
        rank: int | None,
        generation: int,
        clock: Callable[[], float] = time.time,
        complain: Callable[[str], None] | None = None,
        sink: EventSink | None = None,
    ) -> None:
        """Open the log, or with a `sink` leave its file to that one.

        `complain` is told once of an event that was lost, instead of an error.
        """
        self._path = path
        self._node = node
        self.rank = rank
        self.generation = generation
        self._clock = clock
        self._complain = complain
        self._sink = sink or EventFile(path, complain)

    def enter(self, generation: int, *, rank: int | None = None) -> None:
        """Have a generation, and the rank that the writer has in it, stand in further events."""
        self.generation, self.rank = generation, rank

    def write(
        self, event: str, /, *, step: int | None = None, rank: int | None = None, **fields: Any
    ) -> None:
        """Append an event; `fields` holds what JSON can hold.

        `rank` is the worker that the event is about, where it is not the writer's own.
        Raises TypeError for a field that JSON cannot hold, and EventLogError
        where the file cannot take the whole line and nobody is there to complain to.
        """
        self._sink.append(self._compose(event, step, rank, fields))

    def write_through(self, event: str, /, *, step: int | None = None, **fields: Any) -> None:
        """Append an event to the file itself, also where a sink writes the others.

        It is there when this returns, whoever is killed next. Waits for the file.
        """
        with closing(EventFile(self._path, self._complain, is_there=True)) as file:
            file.append(self._compose(event, step, None, fields))

    def close(self) -> None:
        """Close the file or the sink; a second call does nothing."""
        self._sink.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _compose(
        self, event: str, step: int | None, rank: int | None, fields: Mapping[str, Any]
    ) -> bytes:
        record = {
            "time": self._clock(),
            "node": self._node,
            "rank": self.rank if rank is None else rank,
            "generation": self.generation,
            "step": step,
            "event": event,
            "fields": _to_json_value(fields),
        }
        text = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        return f"{text}\n".encode("ascii")


class EventReader:
    """Reads the files of a log while others append to them."""

    def __init__(self, log: Path, *, keeps_open: bool = False) -> None:
        """`keeps_open`: read what is appended after the files were removed, too."""
        self._log, self._keeps_open = log, keeps_open
        self._files: dict[Path, _FileReader] = {}

    def read_new(self) -> list[Event]:
        """Return the events appended since the last call; none while there is no file.

        An unfinished last line waits for the next call. What is no event is passed over.
        """
        for path in event_files(self._log):
            self._files.setdefault(path, _FileReader(path, keeps_open=self._keeps_open))
        return merge_events([each.read_new() for each in self._files.values()])

    def close(self) -> None:
        """Close what was kept open; a second call does nothing."""
        for each in self._files.values():
            each.close()

    @property
    def foreign(self) -> list[str]:
        """Say for each file that has lines which are no events where the first of them is."""
        return [each.first_foreign for each in self._files.values() if each.first_foreign]

    def left_out(self, *, is_over: bool) -> list[str]:
        """Say what was passed over of each file; of a run that is over, unfinished ends as well."""
        return [text for each in self._files.values() for text in each.left_out(is_over=is_over)]


class _FileReader:
    """Reads one file of a log."""

    def __init__(self, path: Path, *, keeps_open: bool) -> None:
        self.first_foreign = ""
        self._path, self._keeps_open = path, keeps_open
        self._file: BinaryIO | None = None
        self._offset = self._num_lines = self._num_torn = self._num_foreign = 0
        self._has_open_end = self._is_within = False
        self._problem = ""

    def read_new(self) -> list[Event]:
        """Return the events appended since the last call, in their order."""
        try:
            file = self._file or open_events_file(self._path)
            with nullcontext() if self._keeps_open else file:
                file.seek(self._offset)
                events = self._read_lines(file)
            self._file = file if self._keeps_open else None
        except OSError as error:
            self._problem = f"{self._path.name} cannot be read: {error.strerror or error}"
            return []
        self._problem = ""
        return events

    def close(self) -> None:
        """Close the file where it was kept open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def left_out(self, *, is_over: bool) -> list[str]:
        """Return a line for each kind of what was passed over."""
        name, more = self._path.name, self._num_foreign - 1
        kinds = {
            self._problem: bool(self._problem),
            f"{self.first_foreign}{f', and {more} more lines' * (more > 0)}": more >= 0,
            f"{self._num_torn} lines of {name} whose writer died within them": self._num_torn > 0,
            f"the end of {name}, which no newline closes": is_over and self._has_open_end,
        }
        return [text for text, is_so in kinds.items() if is_so]

    def _read_lines(self, file: BinaryIO) -> list[Event]:
        events: list[Event] = []
        self._has_open_end = False
        while piece := file.readline(_LINE_BYTES_MAX):
            if not piece.endswith(b"\n") and len(piece) < _LINE_BYTES_MAX:
                self._has_open_end = True
                break
            if (event := self._take(piece)) is not None:
                events.append(event)
        return events

    def _take(self, piece: bytes) -> Event | None:
        """Return the event of a line, of which a piece is less only where the line is too long."""
        self._offset += len(piece)
        is_rest, self._is_within = self._is_within, not piece.endswith(b"\n")
        if is_rest:
            return None
        self._num_lines += 1
        line = piece.removesuffix(b"\n")
        try:
            event = parse_line(line)
        except ValueError as error:
            self._num_foreign += 1
            where = f"{self._path.name}, line {self._num_lines}: {error}"
            self.first_foreign = self.first_foreign or where
            return None
        self._num_torn += bool(line) and event is None
        return event


def open_events_file(path: Path) -> BinaryIO:
    """Open a file of a log to read it."""
    return open(path, "rb", opener=open_plain)


def merge_events(files: Sequence[Sequence[Event]]) -> list[Event]:
    """Return the events of several files in one order.

    Those of one file keep theirs. Between files the generation counts first, since clocks of nodes
    differ, and then the time. What an agent writes before its first generation belongs to that
    one, or where none came to the one that was the newest at the time.
    """
    if sum(map(bool, files)) < 2:
        return [event for events in files for event in events]
    numbered = sorted(
        (event.time, event.generation)
        for events in files
        for event in events
        if event.generation >= 0
    )
    times = [time for time, _ in numbered]
    newest = [-1, *accumulate((number for _, number in numbered), max)]
    placed = []
    for events in files:
        numbers = []
        following = None
        for event in reversed(events):
            if event.generation >= 0:
                following = event.generation
            numbers.append(
                newest[bisect_right(times, event.time)] if following is None else following
            )
        placed.append(zip(accumulate(reversed(numbers), max), events, strict=True))
    merged = merge(*placed, key=lambda each: (each[0], each[1].time))
    return [event for _, event in merged]


def read_events(log: Path) -> list[Event]:
    """Return all events of a log.

    Raises ValueError that names the first line that is no event, and
    FileNotFoundError where there is no log.
    """
    if not event_files(log):
        raise FileNotFoundError(f"no event log at {log}")
    reader = EventReader(log)
    events = reader.read_new()
    if reader.foreign:
        raise ValueError(f"{log.parent}: {reader.foreign[0]}")
    return events


def parse_line(line: bytes) -> Event | None:
    """Return the line's event, or None for one that is empty or was cut short."""
    if not line:
        return None
    if len(line) >= _LINE_BYTES_MAX:
        raise ValueError(f"longer than {_LINE_BYTES_MAX} bytes")
    try:
        record = parse_json(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        if line.startswith(_LINE_START) or _LINE_START.startswith(line):
            return None
        raise
    return _parse_event(record)


def _parse_event(record: Any) -> Event:
    if not isinstance(record, dict) or set(record) != set(_KINDS):
        raise ValueError(f"no event; an event has the keys {', '.join(_KINDS)}")
    for key, kinds in _KINDS.items():
        if type(record[key]) not in kinds:
            raise ValueError(f"no event; {key} cannot be {record[key]!r}")
    if not abs(record["time"]) < TIME_MAX:
        raise ValueError(f"no event; time cannot be {record['time']!r}")
    return Event(**{**record, "time": float(record["time"])})


_KINDS: dict[str, tuple[type, ...]] = {
    "time": (float, int),
    "node": (str,),
    "rank": (int, type(None)),
    "generation": (int,),
    "step": (int, type(None)),
    "event": (str,),
    "fields": (dict,),
}


def _to_json_value(value: Any) -> Any:
    """Return `value` with floats that are no JSON number as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    return value
