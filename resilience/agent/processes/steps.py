"""Steps in what the node's workers print, written to the event log and the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resilience.agent.processes.worker import Worker
from resilience.comm.page import Activity, Page
from resilience.progress import LINE_CHARACTERS_MAX, Progress, Step

_LINES_A_SECOND = 1000
_SEARCH_S = 0.05
"""A second of a worker's lines is searched for so long at most: others wait for the agent too."""
_VALUES_S = 0.5
"""Values in lines of their own are waited for so long after their step."""


@dataclass(kw_only=True)
class _Reading:
    """What one worker has printed."""

    progress: Progress
    second_s: float = 0.0
    num_lines: int = 0
    search_s: float = 0.0


class StepFinder:
    """Writes each step once: of several ranks of the node that show it, for the first."""

    def __init__(
        self, patterns: Sequence[str], *, page: Page, write: Callable[..., None], start: int
    ) -> None:
        """Call `write` as `EventLog.write`; `start` is the number of the run's start."""
        self._patterns = patterns
        self._page, self._write, self._start = page, write, start
        self._readings: dict[Worker, _Reading] = {}
        self._generation = self._newest = -1
        self._newest_s: float | None = None

    def read_lines(self, worker: Worker, lines: Sequence[bytes]) -> None:
        """Look at a worker's lines: of more than fit into a second, at the newest of them."""
        if worker.rank is None or not self._patterns:
            return
        reading = self._readings.get(worker)
        if reading is None:
            reading = self._readings[worker] = _Reading(progress=Progress(self._patterns))
        now_s = time.monotonic()
        if now_s - reading.second_s >= 1:
            reading.second_s, reading.num_lines, reading.search_s = now_s, 0, 0.0
        num = min(len(lines), _LINES_A_SECOND - reading.num_lines)
        reading.num_lines += num
        for line in lines[len(lines) - num :]:
            if reading.search_s >= _SEARCH_S:
                break
            shown = reading.progress.shown
            begin_s = time.perf_counter()
            text = line[: 4 * LINE_CHARACTERS_MAX].decode(errors="replace")
            done = reading.progress.feed(text, now_s)
            reading.search_s += time.perf_counter() - begin_s
            if (new := reading.progress.shown) and (shown is None or new.number > shown.number):
                self._page.mark(worker.slot, new.number, Activity.UPDATE)
            if not reading.progress.has_late_values:
                done = reading.progress.pop()
            if done:
                self._tell(worker, done)

    def settle(self, now_s: float) -> None:
        """Write the steps whose values have been waited for."""
        for worker, reading in self._readings.items():
            shown = reading.progress.shown
            if shown and now_s - shown.seen_s >= _VALUES_S and (step := reading.progress.pop()):
                self._tell(worker, step)

    def forget(self, worker: Worker) -> None:
        """Write the last step of a worker that prints no more."""
        reading = self._readings.pop(worker, None)
        if reading and (step := reading.progress.pop()):
            self._tell(worker, step)

    def _tell(self, worker: Worker, step: Step) -> None:
        if worker.generation > self._generation:
            self._generation, self._newest, self._newest_s = worker.generation, -1, None
        if worker.generation < self._generation or step.number <= self._newest:
            return
        duration_s = None
        if self._newest_s is not None:
            duration_s = (step.seen_s - self._newest_s) / (step.number - self._newest)
        self._newest, self._newest_s = step.number, step.seen_s
        told = {**step.values, "duration_s": duration_s, "start": self._start, "printed": True}
        self._write("step", step=step.number, rank=worker.rank, **told)
