"""What is due about workers that do not get on, do not stop, do not end, or do not start."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from resilience.agent.options import AgentOptions
from resilience.agent.part import NodePart
from resilience.agent.processes.crew import Crew
from resilience.agent.processes.hang import STOPPED_STATES, find_hang, is_silent, next_stopped
from resilience.agent.processes.worker import Worker
from resilience.comm.page import Page

_STOPPED_S = 5.0
"""A process without a rank that was stopped for so many seconds is replaced."""
_LOOK_S = 1.0
_ZYGOTE = -1


class Deadlines:
    """Holds the node's ranks to their deadlines. Which of them hang is decided in `hang`."""

    def __init__(
        self,
        crew: Crew,
        part: NodePart,
        page: Page,
        *,
        options: AgentOptions,
        say: Callable[[str], None],
        leave: Callable[[str], None],
    ) -> None:
        self._crew, self._part, self._page = crew, part, page
        self._hang_deadline_s = options.hang_deadline_s
        self._stop_deadline_s = options.coordinator.stop_deadline_s
        # The other nodes wait while a rank is to stop, and then for two starts in its place.
        self._start_deadline_s = (options.coordinator.join_deadline_s - self._stop_deadline_s) / 2
        self._pause_s = options.coordinator.lease_s / 2
        """An agent that has checked nothing for so long has stood still."""
        self._checked_s = float("inf")
        self._spared_until_s = self._looked_s = float("-inf")
        self._stopped_s: dict[int, float] = {}
        """Since when processes without a rank have been stopped, by their numbers."""
        self._say, self._leave = say, leave

    def note_ready(self, worker: Worker) -> None:
        """Note how long a start has taken: on a slow disk others may take as long."""
        if not worker.is_ready and worker.wanted_s < float("inf"):
            took_s = time.monotonic() - worker.wanted_s
            self._start_deadline_s = max(self._start_deadline_s, took_s)

    def is_stuck(self, worker: Worker) -> bool:
        """Return whether a worker is stopped, and not just because the whole node was."""
        now_s = time.monotonic()
        was_node = now_s < self._spared_until_s or now_s - self._checked_s > self._pause_s
        return worker.state() in STOPPED_STATES and not was_node

    def check(self, now_s: float) -> None:
        """Do what is due."""
        gap_s = now_s - self._checked_s
        self._checked_s = now_s
        if gap_s > self._pause_s:
            # Workers may have stood still as well; they get the time that they have missed.
            self._spared_until_s = now_s + gap_s
        if now_s < self._spared_until_s:
            return
        self._check_progress(now_s)
        self._check_stopping(now_s)
        self._check_starting(now_s)
        self.check_idle(now_s)
        self.check_ending()

    def _check_progress(self, now_s: float) -> None:
        """Break a generation in which no rank of this node gets on."""
        if self._part.is_broken or not self._part.is_member:
            return
        workers = {
            self._part.rank(local_rank): worker
            for local_rank, worker in self._crew.ranks.items()
            if worker is not None and not worker.is_finished
        }
        slots = {rank: self._page.read(worker.slot) for rank, worker in workers.items()}
        deadline_s = self._hang_deadline_s
        getting_on = any(now_s - slot.progress_s < deadline_s for slot in slots.values())
        if getting_on and not any(is_silent(slot, now_s, deadline_s) for slot in slots.values()):
            return
        states = {rank: worker.state() for rank, worker in workers.items()}
        hang = find_hang(slots, states, now_s, deadline_s)
        if hang is None:
            return
        self._part.fail(hang.rank, "hung", hang.text, hang.quiet_s)
        for rank in hang.stopped:
            workers[rank].condemn(signal.SIGKILL)

    def _check_stopping(self, now_s: float) -> None:
        """Replace who does not stop: it is stuck where nothing reaches it.

        Also on a node without a place, which may be given one at any time.
        """
        deadline_s = self._stop_deadline_s
        if not self._part.is_broken or now_s - self._part.broken_s < deadline_s:
            return
        for local_rank, worker in self._crew.ranks.items():
            rank = self._part.rank(local_rank)
            has_told = rank in self._part.reports
            is_waited_for = self._part.is_member and not has_told
            if worker is None or worker.is_condemned:
                continue
            if worker.within is None and not is_waited_for:
                continue
            text = f"rank {rank} did not stop within {deadline_s:g} s; it is replaced"
            if self._part.is_member and has_told:
                # What was told of it, that it holds nothing, is of a process that goes now.
                self._part.fail(rank, "died", text)
            else:
                self._say(text)
            worker.condemn(signal.SIGKILL)

    def _check_starting(self, now_s: float) -> None:
        """End who does not get ready, so that another one is started, while a rank waits for it."""
        if self._crew.is_whole or not (self._part.is_broken and self._part.is_member):
            return
        deadline_s = self._start_deadline_s
        for worker in self._crew.coming:
            if worker.outlives_kill(self._stop_deadline_s):
                self._leave_with(worker, "that was not ready in time")
                return
            if not worker.is_condemned and now_s - worker.wanted_s >= deadline_s:
                self._say(
                    f"process {worker.pid} was not ready within {deadline_s:.3g} s of its start"
                )
                worker.condemn(signal.SIGKILL)

    def check_idle(self, now_s: float) -> None:
        """Replace who is stopped and has no rank: it would be missed once a rank needs it."""
        gap_s, before = now_s - self._looked_s, self._stopped_s
        if gap_s < _LOOK_S:
            return
        self._looked_s = now_s
        if gap_s > _LOOK_S + self._pause_s:
            before = {}  # this agent was stopped with them
        pool, is_member = self._crew.pool, self._part.is_member
        idle = {
            number: worker
            for number, worker in pool.workers.items()
            if not (worker.is_condemned or (is_member and self._crew.owns(worker)))
        }
        states = {number: worker.state() for number, worker in idle.items()}
        states[_ZYGOTE] = pool.zygote.state()
        self._stopped_s = next_stopped(before, states, now_s)
        for number, since_s in self._stopped_s.items():
            if now_s - since_s < _STOPPED_S:
                continue
            name, kill = "the process that forks workers", pool.zygote.kill
            if worker := idle.get(number):
                name = f"process {worker.pid}, which has no rank,"
                kill = partial(worker.condemn, signal.SIGKILL)
            self._part.warn(
                f"{name} has been stopped (state {states[number]}) for {now_s - since_s:.0f} s; "
                "another one takes its place"
            )
            kill()

    def check_ending(self) -> None:
        """Have the node leave the run where one that is in a rank's place cannot be ended.

        Nothing of its program runs any more after SIGKILL, but it holds what it has.
        """
        for local_rank, worker in self._crew.ranks.items():
            if worker is not None and worker.outlives_kill(self._stop_deadline_s):
                self._leave_with(worker, f"of rank {self._part.rank(local_rank)}")
                return

    def _leave_with(self, worker: Worker, which: str) -> None:
        self._leave(
            f"process {worker.pid} {which} has not ended {self._stop_deadline_s:g} s after "
            f"SIGKILL: {worker.describe_stuck()}"
        )
