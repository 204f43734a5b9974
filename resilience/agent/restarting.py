"""The agent of a node whose run does not recover: after any fault all workers begin afresh."""

from __future__ import annotations

import signal
import time

from resilience.agent.agent import Agent
from resilience.agent.processes.workers import Worker
from resilience.comm.messages import Break, End, Failed, Finished

_ASKED_STATUS = 128 + signal.SIGTERM
"""Exit status of a worker that has ended in order, as it or another one was asked to."""


class RestartingAgent(Agent):
    """One node of the run; no worker of it is part of two generations."""

    _kill_s = float("inf")
    """When workers that were asked to end are killed."""

    def join(self) -> None:
        """Tell the coordinator of this node, once its workers are fresh.

        A coordinator that is told again is another one, or has given this node up: the
        generation is over either way.
        """
        workers = self._crew.ranks.values()
        if self._opening is not None and any(each and self._is_used(each) for each in workers):
            self._begin_afresh()
        self._is_joined = False
        if self._crew.is_whole and not any(each and self._is_used(each) for each in workers):
            super().join()

    def _is_used(self, worker: Worker) -> bool:
        return self._opening is not None and worker.generation <= self._generation

    # ---- what the coordinator says

    def _break(self, order: Break) -> None:
        if order.generation != self._generation:
            return
        for stopped in self._reports.values():
            # A new coordinator asks for what an earlier one was told.
            self._succession.tell(stopped)
        if not self._is_broken:
            self._begin_afresh()

    def _begin_afresh(self) -> None:
        """End all workers; the next ones are started when the last of these has ended."""
        self._is_broken = True
        self._crew.done.clear()
        self._kill_s = time.monotonic() + self._options.term_deadline_s
        for worker in self._crew.ranks.values():
            if worker is not None:
                worker.condemn(signal.SIGTERM)
        self._start_afresh()

    def _start_afresh(self) -> None:
        if not any(each and each.is_condemned for each in self._crew.ranks.values()):
            self._kill_s = float("inf")
            self._replace_missing()

    def _end_workers(self, end: End) -> float:
        for worker in self._pool.workers.values():
            if worker.rank is None:
                worker.signal(signal.SIGKILL)
            elif self._stop_status is None and end.status:
                worker.signal(signal.SIGTERM)
        return self._options.term_deadline_s

    # ---- workers

    def _bury_rank(self, worker: Worker, rank: int) -> None:
        if self._is_broken:
            self._start_afresh()
        elif worker.status in (0, _ASKED_STATUS):
            self._crew.done.add(worker.local_rank or 0)
            self._succession.tell(
                Finished(generation=self._generation, rank=rank, status=worker.status)
            )
        else:
            text = f"rank {rank} {worker.describe_end()}"
            self._say(text)
            words = f"{text}: {worker.last_words}" if worker.last_words else text
            self._succession.tell(
                Failed(
                    generation=self._generation,
                    rank=rank,
                    reason="died",
                    text=words,
                    status=_shell_status(worker),
                )
            )

    def _give_up_start(self, worker: Worker, text: str) -> None:
        """End the run: it has no spares to do without."""
        words = f"{text}: {worker.last_words}" if worker.last_words else text
        status = _shell_status(worker)
        rank = self._rank(0)
        self._succession.tell(
            Finished(generation=self._generation, rank=rank, status=status, text=words)
        )
        self._finish(End(status=status, reason=words))

    # ---- deadlines

    def _check_workers(self, now_s: float) -> None:
        if now_s >= self._kill_s:
            self._kill_s = float("inf")
            for worker in self._pool.workers.values():
                if worker.is_condemned:
                    worker.signal(signal.SIGKILL)


def _shell_status(worker: Worker) -> int:
    """Return the status that a shell would give for the end of the process."""
    if worker.status is None:
        return 1
    return worker.status if worker.status >= 0 else 128 - worker.status
