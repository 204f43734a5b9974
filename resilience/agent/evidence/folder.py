"""What agents tell each other by files in the folder of the run.

Each agent leaves a file there that names its address while it lives: who comes later finds the
others by it, and agents that see each other's know that the folder is one. `records` has what the
folder says of the run. All processes of an agent's node hold its file's lock, by which others on
the same machine know that they live, or have ended (`evidence`).

A file server may stand still: only a thread of its own waits for it, and answers when it can.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from resilience.agent.coordination.events import Claimed, Ended, Judged, NodeEnded, Recorded
from resilience.agent.coordination.founding import attempt_name
from resilience.agent.coordination.membership import State
from resilience.agent.evidence.earlier import LOOK_S, StartedAgain, find_later
from resilience.agent.evidence.locks import hold_lock, read_boot_id
from resilience.agent.evidence.questions import Questions
from resilience.agent.evidence.records import FAILURES, RunRecords, find_record, newest_record
from resilience.agent.evidence.removal import is_other
from resilience.agent.evidence.words import (
    AGENTS_FOLDER,
    find_ended,
    find_words,
    has_ended,
    mark_end,
)
from resilience.run_record import mark_stored, read_starts_after
from resilience.state.layout import Layout
from resilience.whole_files import draft_of, write_first, write_text

Answer = Claimed | Judged | NodeEnded | Recorded | StartedAgain


@dataclass(frozen=True, slots=True)
class _Common:
    """Whether the folder is common, as it was asked."""

    is_shared: bool


_Found = Answer | _Common | bool | tuple[NodeEnded, ...] | None


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
        self._number, self._name = number, attempt_name(run, attempt)
        self.records = RunRecords(path, self.start, run, attempt, begins_anew)
        """To be asked here before `announce` alone: they wait for the disk."""
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
        self._questions: Questions[_Found] = Questions("run-folder")

    def fileno(self) -> int:
        """Return a descriptor that is readable while `answers` has something."""
        return self._questions.fileno()

    def _ask(self, question: Callable[[], _Found]) -> None:
        def answer() -> _Found:
            with suppress(OSError):
                if self._file < 0:
                    self._file = os.open(self._path, os.O_DIRECTORY)
            try:
                return question()
            except FAILURES:
                # Who cannot write or read here shares nothing.
                return False

        self._questions.ask(answer)

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
            except FAILURES:
                return _Common(is_shared=False)

        self._num_open += 1
        self._ask(ask)

    @property
    def is_known(self) -> bool:
        """Return whether all has been answered that was asked about a common folder."""
        return self._num_open == 0

    def found(self, agents: tuple[str, ...]) -> None:
        """Try to begin the run with these agents; the answer says whether they may."""
        self._ask(partial(self.records.begin_run, agents))

    def renew(self, state: State, *, is_over: bool = False) -> None:
        """Say who belongs to the run, which generation it has come to, and how it has ended."""

        def write() -> None:
            if not self.is_other():
                self.records.renew(state, is_over=is_over)

        self._is_ending |= is_over
        self._ask(write)

    def read_record(self, after: Ended) -> None:
        """Look how far the run has come, and whether it has ended; `Recorded` follows."""
        if self._is_looking:
            return
        self._is_looking = True

        def look() -> Recorded | None:
            try:
                return self.records.read(after)
            finally:
                self._is_looking = False

        self._ask(look)

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
            except FAILURES:
                return None
            finally:
                self._look_s = now_s + LOOK_S
            return find_later(self._name, names)

        self._ask(look)

    def claim(self, generation: int, layout: Layout) -> None:
        """Ask for the record of a generation's number; the answer says whose it is."""
        self._ask(partial(self.records.claim, generation, layout))

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

        self._ask(look)

    def answers(self) -> list[Answer]:
        """Return what was found out since the last call."""
        found: list[Answer] = []
        for answer in self._questions.answers():
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

    def note_stored(self) -> None:
        """Have the run's record say that a step of it is whole in its store."""
        if not self._has_stored:
            self._has_stored = True
            self._ask(partial(mark_stored, self._path))

    def close(self, *, has_processes: bool = False) -> None:
        """Take this agent's word back, unless the disk stands still; the run's end has longer.

        Where the run's record is not over, the word is marked instead: the next run in the folder
        waits for the agents that the record names, and an agent without a word may live. The word
        stays as it is where processes of the agent outlive it: they hold its lock.
        """
        self._ask(partial(self._remove, has_processes=has_processes))
        self._questions.close(_END_S if self._is_ending else _CLOSE_S)

    def _remove(self, *, has_processes: bool) -> None:
        self._draft.unlink(missing_ok=True)
        path, newest = self._path / AGENTS_FOLDER / self.start, find_record(self._path)
        if not newest or newest.is_over:
            path.unlink(missing_ok=True)
        elif not has_processes:
            mark_end(path, self.start)


_CLOSE_S = 2.0
_END_S = 30.0
"""Whoever does not learn of a run's end waits for those that have ended, before a new start too."""
