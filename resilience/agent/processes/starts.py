"""Whether what does not start would start at another try. Pure.

What was killed is tried again, and so is what ended by itself, until it ends with a status and last
words that an earlier try had: it would do so for ever.
"""

from __future__ import annotations

from resilience.agent.processes.worker import Worker

_STARTS_MAX = 3
"""Starts in a row that may fail before a process is ready."""
_LATE_STARTS_MAX = 2
"""Starts in a row that may take too long; the other nodes do not wait for a third."""
_BEGUN_S = 60.0
"""A program without a block that ends later than this after its start had begun its work."""


class Starts:
    """Failed starts, one after the other.

    Processes that were on their way together, as those of a generation are, are one start.
    """

    def __init__(self) -> None:
        self.num = 0
        """How many there were in a row."""
        self._newest = -1
        self._ends: set[tuple[int, str]] | None = None
        """How processes of the last start ended; None where it proves nothing."""
        self._before: set[tuple[int, str]] | None = None
        """Ends of processes in the starts before it: the first to fail differs between starts."""

    def clear(self) -> None:
        """Note that a start has gone well."""
        self.num, self._ends = 0, None

    def fail(self, number: int, status: int | None, words: str, *, newest: int) -> bool:
        """Note that a process has ended too early; returns whether another one would as well.

        `newest` is the highest number of those that are on their way. The status is that of
        Popen: negative for a signal, and None where there was no process.
        """
        if number > self._newest:
            self.num += 1
            if self._ends is None:
                self._before = None
            else:
                self._before = (self._before or set()) | self._ends
            self._newest, self._ends = newest, set()
        if status is None or status < 0:
            self._ends = None
        if self._ends is None or status is None:
            return False
        self._ends.add((status, words))
        return self._before is not None and (status, words) in self._before


class Tries:
    """The failed starts of a node's processes, and of its program where that has no block."""

    def __init__(self) -> None:
        self._processes, self._programs, self._late = Starts(), Starts(), Starts()
        self.has_begun = False
        """The program has come to a block, in some process of this node."""

    def note_ready(self, *, has_block: bool) -> None:
        """Note that a process is warm, or that its program has come to a block."""
        self._processes.clear()
        self._late.clear()
        if has_block:
            self.has_begun = True
            self._programs.clear()

    def give_up_process(self, worker: Worker, newest: int) -> str | None:
        """Return why no other process is started for one that has never been ready.

        One that the agent has ended was not ready in time: it may have waited for a disk.
        """
        if worker.is_condemned:
            self._late.fail(worker.number, None, "", newest=newest)
            is_last = self._late.num >= _LATE_STARTS_MAX
            return f"was not ready in time, {self._late.num} times in a row" if is_last else None
        starts = self._processes
        comes_again = starts.fail(worker.number, worker.status, worker.last_words, newest=newest)
        if not comes_again and starts.num < _STARTS_MAX:
            return None
        times = f", {starts.num} times in a row" if starts.num > 1 else ""
        return worker.describe_end(f" before it was ready{times}")

    def give_up_program(self, worker: Worker, age_s: float) -> str | None:
        """Return why a program that has come to no block is not run again.

        One that has run for a while had begun: its failure is a fault like any other.
        """
        if worker.is_attached or worker.is_condemned:
            return None
        if age_s >= _BEGUN_S:
            self._programs.clear()
            return None
        number = worker.generation
        if not self._programs.fail(number, worker.status, worker.last_words, newest=number):
            return None
        return worker.describe_end(" in two starts")
