"""The agent of a node whose run recovers: workers live on through faults of others."""

from __future__ import annotations

import signal
import time

from resilience.agent.agent import Agent
from resilience.agent.ending import GOOD_END_S, LAST_WORDS_S, LEFT_STATUS
from resilience.agent.processes.worker import Worker
from resilience.comm.messages import Break, End


class RecoveringAgent(Agent):
    """One node of the run; its workers stop at a fault, and go on with what they hold."""

    def _break(self, order: Break) -> None:
        if order.generation == self._part.generation:
            self._stop_workers(order.reason)

    def _end_workers(self, end: End) -> float:
        # Where the agent was asked to end, workers with a block know already.
        is_asked = self.ending.stop_status is not None
        workers = list(self._pool.workers.values())
        for worker in workers:
            has_rank = worker.rank is not None and not worker.is_condemned
            if worker.is_finished or (has_rank and end.status == 0):
                worker.send(end)
            elif not is_asked or not has_rank or worker.is_attached:
                worker.signal(signal.SIGKILL)
        return GOOD_END_S if any(map(self.ending.is_needed, workers)) else LAST_WORDS_S

    def _bury_rank(self, worker: Worker, rank: int) -> None:
        local_rank = worker.local_rank or 0
        if worker.status == 0 and not (worker.is_attached or self._part.is_broken):
            # A program without a block of its own that has come to its end.
            self._crew.done.add(local_rank)
            self._part.finish(0, local_rank=local_rank)
            return
        age_s = time.monotonic() - self._part.opened_s
        problem = self._tries.give_up_program(worker, age_s)
        if problem and self._tries.has_begun:
            self.ending.leave(f"rank {rank} {problem}", worker.status or 1)
        elif problem:
            self._part.finish(worker.status or 1, problem, local_rank)
        elif not worker.is_condemned:
            # One that was killed had no last words about it.
            how = worker.describe_end("" if worker.status and worker.status > 0 else None)
            self._part.fail(rank, worker.end_reason, f"rank {rank} {how}")
        self._replace_missing()

    def _give_up_start(self, worker: Worker, text: str) -> None:
        """Do without spares, or leave the run."""
        if self._part.opening is not None and self._crew.is_whole:
            # The run has all that it needs now.
            self._part.warn(f"{text}; the run goes on without spares on this node")
            self._crew.stop_refill()
            return
        status = LEFT_STATUS if worker.is_condemned else max(1, worker.status or 1)
        self.ending.give_up(text, status)

    def _check_workers(self, now_s: float) -> None:
        self._deadlines.check(now_s)
