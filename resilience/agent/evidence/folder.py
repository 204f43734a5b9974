"""What agents tell each other by files in the folder of the run.

Each agent leaves a file there that names its address while it lives: who comes later finds the
others by it, and agents that see each other's know that the folder is one. Half of a generation
goes on only with the record of the next one's number, which the file system gives to one of them.
All processes of an agent's node hold its file's lock, by which others on the same machine know that
they live, or have ended (`evidence`).

A file server may stand still: only a thread of its own waits for it, and answers when it can.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from pydantic import TypeAdapter

from resilience.agent.coordination.events import Claimed, Ended, Judged, NodeEnded, Recorded
from resilience.agent.coordination.founding import Record, attempt_name, judge, note_agents
from resilience.agent.coordination.membership import State
from resilience.agent.evidence.earlier import LOOK_S, StartedAgain, find_later
from resilience.agent.evidence.locks import hold_lock, read_boot_id
from resilience.agent.evidence.removal import is_other
from resilience.agent.evidence.words import (
    AGENTS_FOLDER,
    find_ended,
    find_words,
    has_ended,
    mark_end,
)
from resilience.plain_files import read_plain
from resilience.run_record import mark_stored, read_starts_after
from resilience.runtime.wake import Wake
from resilience.state.layout import Layout
from resilience.whole_files import draft_of, write_first, write_text, write_whole

RECORDS_FOLDER = "generations"
_END = "-ended-"
_RECORD = TypeAdapter(Record)
_RECORD_NAME = re.compile(rf"run-(\d+)(?:{_END}\d+)?")


Answer = Claimed | Judged | NodeEnded | Recorded | StartedAgain


@dataclass(frozen=True, slots=True)
class _Common:
    """Whether the folder is common, as it was asked."""

    is_shared: bool


_Found = Answer | _Common | bool | tuple[NodeEnded, ...] | None


class TornError(ValueError):
    """A record is none; the message names its file."""


class RunFolder:
    """One agent's view of the folder. Its methods are for the agent's thread and never wait."""

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        attempt: int = 0,
        begins_anew: bool = True,
        number: int | None = None,
    ) -> None:
        """`begins_anew`: whether this agent begins a run once more that has ended.

        `number` is that of its start in the run's record, None where it has none.
        """
        self.start = secrets.token_hex(8)
        """Name of this start of the agent."""
        self.is_shared = False
        """Whether the coordinator that was followed last sees the same folder."""
        self._path = path
        self._file = -1
        self._run, self._attempt = run, attempt
        self._begins_anew, self._number = begins_anew, number
        self._name = attempt_name(run, attempt)
        self._record: Record | None = None
        """Under which the run goes on that this agent coordinates."""
        self._seen: Record | None = None
        self._seen_s = time.monotonic()
        """Since when the newest record has been as it is."""
        self._draft = draft_of(self._path / AGENTS_FOLDER / self.start, self.start)
        """What the agent's file is called before it has its name."""
        self._lock = -1
        self._boot = read_boot_id()
        self._has_stored = False
        """Whether the run's record was asked to say that a step is in the store."""
        self._is_checking = False
        """Whether an answer about silent agents is still to come."""
        self._is_looking = False
        """Whether one about the end of the run is."""
        self._look_s = float("-inf")
        """When it is time to look for later starts; never while an answer is to come."""
        self._is_ending = False
        """Whether the folder was asked to say that the run has ended."""
        self._num_open = 0
        """How often it was asked whether the folder is common, without an answer so far."""
        self._questions: SimpleQueue[Callable[[], _Found] | None] = SimpleQueue()
        self._answers: deque[_Found] = deque()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._work, name="run-folder", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `answers` has something."""
        return self._wake.fileno()

    def hold_lock(self) -> int:
        """Hold the lock by which others on this machine know that the agent or a worker lives.

        Returns the descriptor, which every process of the node is to inherit, -1 where the folder
        takes no file. Waits for the disk.
        """
        try:
            (self._path / AGENTS_FOLDER).mkdir(exist_ok=True)
            self._lock = hold_lock(self._draft)
        except OSError:
            self._lock = -1
        return self._lock

    def announce(self, address: str, node: str = "") -> None:
        """Let others know of this agent; a folder that takes no file is not shared."""
        # Of an agent without a lock nobody can tell whether it has ended.
        boot = self._boot if self._lock >= 0 else ""
        word = {"run": self._name, "address": address, "node": node, "boot": boot}

        def write() -> bool:
            folder = self._path / AGENTS_FOLDER
            folder.mkdir(exist_ok=True)
            # A mount that cannot link gives no record to anybody: it is nobody's common folder.
            probe = folder / f".{self.start}.probe"
            write_first(probe, {}, self.start)
            # A file server that fails over may do it twice.
            probe.unlink(missing_ok=True)
            # The file whose lock is held gets its name.
            write_text(self._draft, json.dumps(word), "w")
            self._draft.replace(folder / self.start)
            return True

        self._find_out(write)

    def look(self, start: str) -> None:
        """Find out whether another agent sees this folder; `is_shared` follows."""
        self._find_out((self._path / AGENTS_FOLDER / start).is_file)

    def is_other(self) -> bool:
        """Return whether another folder has the name of the run's by now; waits for the disk."""
        return is_other(self._file, self._path / AGENTS_FOLDER / self.start)

    def _find_out(self, is_shared: Callable[[], bool]) -> None:
        def ask() -> _Common:
            try:
                return _Common(is_shared())
            except _FAILURES:
                return _Common(is_shared=False)

        self._num_open += 1
        self._questions.put(ask)

    @property
    def is_known(self) -> bool:
        """Return whether all has been answered that was asked about a common folder."""
        return self._num_open == 0

    def found(self, agents: tuple[str, ...]) -> None:
        """Try to begin the run with these agents; the answer says whether they may."""

        def write() -> Judged:
            try:
                return begin()
            except TornError as error:
                return Judged(record=None, reason=str(error))
            except (OSError, ValueError) as error:
                return Judged(record=None, reason=f"{self._path} does not answer: {error}")

        def begin() -> Judged:
            newest = newest_record(self._path)
            if not self._begins_anew and newest and newest.is_over and self._is_ours(newest):
                return Judged(record=None, reason="it has ended")
            if newest != self._seen:
                self._seen, self._seen_s = newest, time.monotonic()
            record = judge(
                newest,
                run=self._run,
                attempt=self._attempt,
                newcomers=agents,
                unchanged_s=time.monotonic() - self._seen_s,
                ended=self._find_ended_of(newest) if newest else (),
            )
            if isinstance(record, str):
                return Judged(record=None, reason=record)
            path = self._path / RECORDS_FOLDER / f"run-{record.number}"
            if not write_first(path, asdict(record), self.start):
                return Judged(record=None, reason="others have begun it")
            self._record = record
            return Judged(record=record)

        self._questions.put(write)

    def renew(self, state: State, *, is_over: bool = False) -> None:
        """Say who belongs to the run, which generation it has come to, and how it has ended.

        A run that has ended stays so, whoever wakes up later, and who is behind the others says
        nothing of it. Only a later generation shows that it goes on all the same.
        """
        generation = state.generation

        def write() -> None:
            newest: Record | None = None
            with suppress(TornError):
                newest = newest_record(self._path)
            record = self._record or newest
            if record is None or not self._is_ours(record):
                return
            told = (record.number, generation, False)
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
                generation=generation,
                renewal=record.renewal + 1,
                is_over=is_over,
                status=state.ending.status if state.ending else 0,
            )
            self._write(self._record)

        self._is_ending |= is_over
        self._questions.put(write)

    def _write(self, record: Record) -> None:
        """Replace the record; that of an end stays, whatever a renewal that stood still does."""
        name, folder = f"run-{record.number}", self._path / RECORDS_FOLDER
        if self.is_other():
            return
        if record.is_over:
            write_first(folder / f"{name}{_END}{record.generation}", asdict(record), self.start)
        else:
            write_whole(folder / name, asdict(record), self.start)

    def read_record(self, after: Ended) -> None:
        """Look how far the run has come, and whether it has ended; `Recorded` follows."""
        if self._is_looking:
            return
        self._is_looking = True

        def look() -> Recorded | None:
            found = _find_record(self._path)
            self._is_looking = False
            if found is None or not self._is_ours(found):
                return None
            return Recorded(
                generation=found.generation,
                starts=dict(found.starts),
                gone=frozenset(found.gone),
                after=after,
                is_over=found.is_over,
                status=found.status,
            )

        self._questions.put(look)

    def look_for_later(self, now_s: float) -> None:
        """Look from time to time whether the scheduler has started the run again.

        `StartedAgain` follows if so.
        """
        if now_s < self._look_s:
            return
        self._look_s = float("inf")

        def look() -> StartedAgain | None:
            try:
                newest, number = newest_record(self._path), self._number
                names = [attempt_name(newest.run, newest.attempt)] if newest else []
                if number is not None:
                    names += [each.name for each in read_starts_after(self._path, number)]
            except _FAILURES:
                return None
            finally:
                self._look_s = now_s + LOOK_S
            return find_later(self._name, names)

        self._questions.put(look)

    def _is_ours(self, record: Record) -> bool:
        return (record.run, record.attempt) == (self._run, self._attempt)

    def claim(self, generation: int, layout: Layout) -> None:
        """Ask for the record of a generation's number; the answer says whose it is."""
        path = self._path / RECORDS_FOLDER / f"{self._name}-{generation}"

        def write() -> Claimed:
            try:
                write_first(path, asdict(layout), self.start)
                found = TypeAdapter(Layout).validate_json(read_plain(path))
            except OSError as error:
                return Claimed(generation=generation, layout=None, reason=str(error))
            except ValueError:
                return Claimed(generation=generation, layout=None, reason=f"{path} is torn")
            return Claimed(generation=generation, layout=found)

        self._questions.put(write)

    def check(self, doubted: Mapping[str, frozenset[str]]) -> None:
        """Look whether silent agents have ended on this machine; `NodeEnded` follows for these."""
        if self._is_checking or not doubted:
            return
        self._is_checking = True

        def look() -> tuple[NodeEnded, ...]:
            # Those of other machines need no look at the files of all agents.
            folder = self._path / AGENTS_FOLDER
            paths = {node: map(folder.joinpath, starts) for node, starts in doubted.items()}
            likely = [node for node, each in paths.items() if all(map(has_ended, each))]
            ended = find_ended(self._path, likely, self._name) if likely else {}
            reason = "all its processes on this machine have ended"
            return tuple(
                NodeEnded(node=node, starts=doubted[node], reason=reason)
                for node, found in ended.items()
                if doubted[node] and doubted[node] <= found
            )

        self._questions.put(look)

    def _find_ended_of(self, record: Record) -> dict[str, set[str]]:
        """Return which agents of a record have ended for certain, and as what."""
        name = attempt_name(record.run, record.attempt)
        return find_ended(self._path, record.agents, name, record.starts)

    def answers(self) -> list[Answer]:
        """Return what was found out since the last call."""
        self._wake.clear()
        found: list[Answer] = []
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, _Common):
                self._num_open -= 1
                self.is_shared = answer.is_shared
            elif isinstance(answer, bool):
                self.is_shared = answer
            elif isinstance(answer, tuple):
                self._is_checking = False
                found += answer
            elif answer is not None:
                found.append(answer)
        return found

    def find_agents(self) -> list[str]:
        """Return the addresses of agents of this run that have left word; waits for the disk."""
        words = find_words(self._path)
        return [word["address"] for word in words if word.get("run") == self._name]

    def goes_on(self) -> bool:
        """Return whether a run that has begun here goes on without this agent; waits for the disk.

        Not where it is certain that no agent of it lives.
        """
        record = _find_record(self._path)
        if record is None or record.is_over or not self._is_ours(record):
            return False
        return record.generation >= 0 and not set(record.agents) <= set(self._find_ended_of(record))

    def find_end(self) -> int | None:
        """Return with which status the run has ended, None where it has not; waits for the disk."""
        record = _find_record(self._path)
        is_end = record is not None and record.is_over and self._is_ours(record)
        return record.status if record and is_end else None

    def note_stored(self) -> None:
        """Have the run's record say that a step of it is whole in its store."""
        if not self._has_stored:
            self._has_stored = True
            self._questions.put(lambda: mark_stored(self._path))

    def close(self) -> None:
        """Take this agent's word back, unless the disk stands still; the run's end has longer.

        Where the run's record is not over, the word is marked instead: the next run in the folder
        waits for the agents that the record names, and an agent without a word may live.
        """
        self._questions.put(self._remove)
        self._questions.put(None)
        self._thread.join(_END_S if self._is_ending else _CLOSE_S)

    def _remove(self) -> None:
        self._draft.unlink(missing_ok=True)
        path, newest = self._path / AGENTS_FOLDER / self.start, _find_record(self._path)
        if newest and not newest.is_over:
            mark_end(path, self.start)
        else:
            path.unlink(missing_ok=True)

    def _work(self) -> None:
        with suppress(OSError):
            self._file = os.open(self._path, os.O_DIRECTORY)
        while (question := self._questions.get()) is not None:
            try:
                self._answers.append(question())
            except _FAILURES:
                # Who cannot write or read here shares nothing.
                self._answers.append(False)
            self._wake.set()


_CLOSE_S = 2.0
_END_S = 30.0
"""Whoever does not learn of a run's end waits for those that have ended, before a new start too."""
_FAILURES = (OSError, ValueError, TypeError, RecursionError)


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


def _find_record(path: Path) -> Record | None:
    """Return the newest record; None where none can be read."""
    with suppress(*_FAILURES):
        return newest_record(path)
    return None


def find_last_end(path: Path) -> int | None:
    """Return with which status the run that a folder had last has ended, None where it has not.

    Nor where an agent has left word of another start, which may go on. Waits for the disk.
    """
    record = _find_record(path)
    if record is None or not record.is_over:
        return None
    name = attempt_name(record.run, record.attempt)
    return record.status if all(each.get("run") == name for each in find_words(path)) else None
