"""How a node's part of the run ends: with which status, and when its processes have to be gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from resilience.agent.processes.worker import Worker
from resilience.agent.processes.workers import WorkerPool
from resilience.comm.messages import End

LEFT_STATUS = 128 + signal.SIGKILL
"""Exit status of an agent whose node leaves a run that may go on: that of one that was killed, so
that whoever has started it takes the node for lost."""
LAST_WORDS_S = 5.0
"""How long workers may take to end by themselves once the run has failed."""
GOOD_END_S = 60.0
"""How long they may take once it has ended well: what follows a block may still write."""


def end_workers(pool: WorkerPool, end: End, *, is_asked: bool) -> float:
    """Have workers with a block end as the run does; returns how many seconds they have.

    Where the agent `is_asked` to end they know already.
    """
    for worker in pool.workers.values():
        has_rank = worker.rank is not None and not worker.is_condemned
        if worker.is_finished or (has_rank and end.status == 0):
            worker.send(end)
        elif not is_asked or not has_rank or worker.is_attached:
            worker.signal(signal.SIGKILL)
    return LAST_WORDS_S if end.status else GOOD_END_S


class Ending:
    """Knows the end once there is one, and ends what is left at the end of a time limit."""

    def __init__(
        self, pool: WorkerPool, say: Callable[[str], None], *, stop_deadline_s: float
    ) -> None:
        self._pool, self._say = pool, say
        self._kill_deadline_s = min(LAST_WORDS_S, stop_deadline_s)
        self.end: End | None = None
        self.stop_status: int | None = None
        """Exit status once somebody has asked the agent to end."""
        self._limit_s = float("inf")

    def ask(self, status: int, deadline_s: float) -> None:
        """Note that somebody has asked the agent to end, within the deadline."""
        self.stop_status = status
        if self.end is None:
            self._limit(deadline_s)

    def begin(self, end: End, deadline_s: float) -> None:
        """Note how the run ends, and how long workers may take from now on."""
        self.end = end
        self._limit(deadline_s)

    def _limit(self, deadline_s: float) -> None:
        self._limit_s = min(self._limit_s, time.monotonic() + deadline_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether the processes that are left have had their time."""
        return now_s >= self._limit_s

    def is_over(self) -> bool:
        """Return whether nothing is left to wait for.

        A process that not even SIGKILL ends is in the kernel's hands, or a driver's.
        """
        return self.end is not None and all(
            worker.is_ended or worker.outlives_kill(self._kill_deadline_s)
            for worker in self._pool.workers.values()
        )

    def kill_all(self) -> None:
        """End what is left."""
        for worker in self._pool.workers.values():
            if worker.rank is not None and self.end and self.end.status == 0:
                self._say(f"rank {worker.rank} did not end within {GOOD_END_S:g} s of the run")
            worker.signal(signal.SIGKILL)
        self._limit_s = float("inf")

    def note_late(self, worker: Worker) -> None:
        """Note that a rank failed after the run had ended well.

        That is a failure of the run where its program may have had more to do.
        """
        assert self.end is not None
        if self.end.status or not worker.status or worker.rank is None:
            return
        text = f"rank {worker.rank} {worker.describe_end()} after its last step"
        if worker.is_done:
            self._say(f"{text}; the run had finished before")
            return
        self._say(text)
        self.end = End(status=max(1, worker.status), reason=text)
