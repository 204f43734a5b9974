"""The records of a run in its folder: who belongs to it, how far it is, which members come next.

Half of a generation goes on only with the record of the next one's number, which the file system
gives to one of them. Each function waits for the disk.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

from resilience.agent.coordination.events import Claimed, Ended, Judged, Recorded
from resilience.agent.coordination.founding import Record, attempt_name, judge, note_agents
from resilience.agent.coordination.membership import State
from resilience.agent.evidence.words import find_ended, find_words
from resilience.plain_files import read_plain
from resilience.state.layout import Layout
from resilience.whole_files import write_first, write_whole

RECORDS_FOLDER = "generations"
FAILURES = (OSError, ValueError, TypeError, RecursionError)
"""Of a folder that does not answer, or holds something else."""
_END = "-ended-"
_RECORD = TypeAdapter(Record)
_RECORD_NAME = re.compile(rf"run-(\d+)(?:{_END}\d+)?")


class TornError(ValueError):
    """A record is none; the message names its file."""


@dataclass(slots=True)
class RunRecords:
    """The records as one agent reads and writes them; see `RunFolder`. One thread."""

    path: Path
    start: str
    run: str
    attempt: int
    begins_anew: bool
    _record: Record | None = None
    """Under which the run goes on that this agent coordinates."""
    _seen: Record | None = None
    _seen_s: float = field(default_factory=time.monotonic)
    """Since when the newest record has been as it is."""

    def begin_run(self, agents: tuple[str, ...]) -> Judged:
        """Begin the run with these agents, where they may."""
        try:
            newest = newest_record(self.path)
            if not self.begins_anew and newest and newest.is_over and self._is_ours(newest):
                return Judged(record=None, reason="it has ended")
            if newest != self._seen:
                self._seen, self._seen_s = newest, time.monotonic()
            record = judge(
                newest,
                run=self.run,
                attempt=self.attempt,
                newcomers=agents,
                unchanged_s=time.monotonic() - self._seen_s,
                ended=self._find_ended_of(newest) if newest else (),
            )
            if isinstance(record, str):
                return Judged(record=None, reason=record)
            path = self.path / RECORDS_FOLDER / f"run-{record.number}"
            if not write_first(path, asdict(record), self.start):
                return Judged(record=None, reason="others have begun it")
        except TornError as error:
            return Judged(record=None, reason=str(error))
        except (OSError, ValueError) as error:
            return Judged(record=None, reason=f"{self.path} does not answer: {error}")
        self._record = record
        return Judged(record=record)

    def renew(self, state: State, *, is_over: bool) -> None:
        """Say who belongs to the run, which generation it has come to, and how it has ended.

        A record of an end stays. An agent that wakes up later, or that is behind the others, writes
        nothing. Only a later generation replaces a record of an end.
        """
        newest: Record | None = None
        with suppress(TornError):
            newest = newest_record(self.path)
        record = self._record or newest
        if record is None or not self._is_ours(record):
            return
        told = (record.number, state.generation, False)
        if newest and (newest.number, newest.generation, newest.is_over) > told:
            return
        noted = note_agents(
            newest or record, state.known, state.starts, here=state.present, gone=state.gone
        )
        self._record = replace(
            record,
            agents=noted.agents,
            starts=noted.starts,
            gone=noted.gone,
            generation=state.generation,
            renewal=record.renewal + 1,
            is_over=is_over,
            status=state.ending.status if state.ending else 0,
        )
        self._write(self._record)

    def _write(self, record: Record) -> None:
        """Replace the record; that of an end stays, whatever a renewal that stood still does."""
        name, folder = f"run-{record.number}", self.path / RECORDS_FOLDER
        if record.is_over:
            write_first(folder / f"{name}{_END}{record.generation}", asdict(record), self.start)
        else:
            write_whole(folder / name, asdict(record), self.start)

    def read(self, after: Ended) -> Recorded | None:
        """Return how far the run has come, and whether it has ended; None where no record says."""
        found = self._find_own()
        return None if found is None else Recorded.read(found, after)

    def claim(self, generation: int, layout: Layout) -> Claimed:
        """Ask for the record of a generation's number; the answer says whose it is."""
        name = f"{attempt_name(self.run, self.attempt)}-{generation}"
        path = self.path / RECORDS_FOLDER / name
        try:
            write_first(path, asdict(layout), self.start)
            found = TypeAdapter(Layout).validate_json(read_plain(path))
        except OSError as error:
            return Claimed(generation=generation, layout=None, reason=str(error))
        except ValueError:
            return Claimed(generation=generation, layout=None, reason=f"{path} is torn")
        return Claimed(generation=generation, layout=found)

    def goes_on(self) -> bool:
        """Return whether a run that has begun here goes on without this agent.

        Not where it is certain that no agent of it lives.
        """
        record = self._find_own()
        if record is None or record.is_over or record.generation < 0:
            return False
        return not set(record.agents) <= set(self._find_ended_of(record))

    def find_end(self) -> int | None:
        """Return with which status the run has ended, None where it has not."""
        record = self._find_own()
        return record.status if record and record.is_over else None

    def _find_own(self) -> Record | None:
        """Return the newest record where it is this run's; None also where none can be read."""
        record = find_record(self.path)
        return record if record and self._is_ours(record) else None

    def _is_ours(self, record: Record) -> bool:
        return (record.run, record.attempt) == (self.run, self.attempt)

    def _find_ended_of(self, record: Record) -> dict[str, set[str]]:
        """Return which agents of a record have ended for certain, and as what."""
        name = attempt_name(record.run, record.attempt)
        return find_ended(self.path, record.agents, name, record.starts)


def _read_record(path: Path) -> Record:
    """Return what a file says of the run; TornError for no record."""
    try:
        return _RECORD.validate_json(read_plain(path))
    except ValueError:
        raise TornError(
            f"{path} is torn; remove it once no process of the run lives any more"
        ) from None


def newest_record(path: Path) -> Record | None:
    """Return the last of those who have begun a run in a folder; TornError for no record."""
    paths = list((path / RECORDS_FOLDER).glob("run-*"))
    found = [_RECORD_NAME.fullmatch(each.name) for each in paths]
    numbers = [int(each[1]) for each in found if each]
    records = [
        _read_record(each)
        for each, name in zip(paths, found, strict=True)
        if name and int(name[1]) == max(numbers)
    ]
    return max(records, key=lambda each: (each.generation, each.is_over), default=None)


def find_record(path: Path) -> Record | None:
    """Return the newest record; None where none can be read."""
    with suppress(*FAILURES):
        return newest_record(path)
    return None


def find_last_end(path: Path) -> int | None:
    """Return with which status the run that a folder had last has ended, None where it has not.

    Nor where an agent has left word of another start, which may go on. Waits for the disk.
    """
    record = find_record(path)
    if record is None or not record.is_over:
        return None
    name = attempt_name(record.run, record.attempt)
    return record.status if all(each.get("run") == name for each in find_words(path)) else None
