"""The agent of a node whose run does not recover: after any fault all workers begin afresh."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import cached_property

from resilience.agent.agent import Agent
from resilience.agent.processes.hang import STOPPED_STATES
from resilience.agent.processes.output import WorkerStream
from resilience.agent.processes.stillness import Observation, Stillness
from resilience.agent.processes.tree import read_processes, sum_processor_s
from resilience.agent.processes.worker import Worker
from resilience.comm.messages import Break, End, Failed, Finished
from resilience.comm.page import Activity
from resilience.node_config import UNSTORED_STATUS

_CAUSE_WAIT_S = 2.0
"""How long the end of a worker whose peer has closed a connection waits for that of the peer.

Of a process that is killed, the connections close before it has ended, and on a busy machine long
before: the other worker may end first, and would be named in its place.
"""
_ASKED_STATUS = 128 + signal.SIGTERM
"""Exit status of a worker that has ended in order, as it or another one was asked to."""
_OWN_ENDS = (_ASKED_STATUS, UNSTORED_STATUS)


class RestartingAgent(Agent):
    """One node of the run; no worker of it is part of two generations."""

    _kill_s = float("inf")
    """When workers that were asked to end are killed."""
    _consequences: tuple[tuple[float, Failed], ...] = ()
    """Ends that are told at a time unless the generation is over by then, which the cause ends."""

    @cached_property
    def _stillness(self) -> Stillness | None:
        deadline_s, pause_s = self._options.still_deadline_s, self._options.coordinator.lease_s / 2
        return None if deadline_s is None else Stillness(deadline_s, pause_s)

    def join(self) -> None:
        """Tell the coordinator of this node, once its workers are fresh.

        A coordinator that is told again is another one, or has given this node up: the
        generation is over either way.
        """
        workers = self._crew.ranks.values()
        is_used = any(each and self._is_used(each) for each in workers)
        # All of them may have ended by then: nothing has begun afresh for that alone.
        if self._part.opening is not None and (is_used or not self._part.is_broken):
            self._begin_afresh()
        self._is_joined = False
        if self._crew.is_whole and not any(each and self._is_used(each) for each in workers):
            super().join()

    def _is_used(self, worker: Worker) -> bool:
        return self._part.opening is not None and worker.generation <= self._part.generation

    # ---- what the coordinator says

    def _break(self, order: Break) -> None:
        if order.generation != self._part.generation:
            return
        for stopped in self._part.reports.values():
            # A new coordinator asks for what an earlier one was told.
            self._membership.tell(stopped)
        if not self._part.is_broken:
            self._begin_afresh()

    def _begin_afresh(self) -> None:
        """End all workers; the next ones are started when the last of these has ended."""
        self._part.end()
        self._crew.done.clear()
        self._kill_s = time.monotonic() + self._options.term_deadline_s
        for worker in self._crew.ranks.values():
            if worker is not None:
                worker.condemn(signal.SIGTERM)
        self._start_afresh()

    def _start_afresh(self) -> None:
        if not any(each and each.is_condemned for each in self._crew.ranks.values()):
            self._kill_s = float("inf")
            self._pool.end_orphans()
            self._replace_missing()

    def _end_workers(self, end: End) -> float:
        for worker in self._pool.workers.values():
            if worker.rank is None:
                worker.signal(signal.SIGKILL)
            elif self.ending.stop_status is None and end.status:
                worker.signal(signal.SIGTERM)
        return self._options.term_deadline_s

    # ---- workers

    def _bury_rank(self, worker: Worker, rank: int) -> None:
        if self._part.is_broken:
            self._start_afresh()
        elif worker.status == 0 or (worker.status in _OWN_ENDS and not self._options.is_script):
            self._crew.done.add(worker.local_rank or 0)
            self._membership.tell(
                Finished(generation=self._part.generation, rank=rank, status=worker.status)
            )
        else:
            text = f"rank {rank} {worker.describe_end()}"
            self._say(text)
            words = f"{text}: {worker.last_words}" if worker.last_words else text
            failed = Failed(
                generation=self._part.generation,
                rank=rank,
                reason="died",
                text=words,
                status=self._failed_status(worker),
            )
            if worker.has_lost_peer:
                due_s = time.monotonic() + _CAUSE_WAIT_S
                self._consequences = (*self._consequences, (due_s, failed))
            else:
                self._membership.tell(failed)

    def _failed_status(self, worker: Worker) -> int:
        """Return how the run ends by this; a user's program does not say what an agent means."""
        status = _shell_status(worker)
        return 1 if self._options.is_script and status in _OWN_ENDS else status

    def _give_up_start(self, worker: Worker, text: str) -> None:
        """End the run: it has no spares to do without."""
        status = _shell_status(worker)
        self._part.finish(status, text)
        self.ending.finish(End(status=status, reason=text))

    # ---- deadlines

    def _check_workers(self, now_s: float) -> None:
        self._deadlines.check_ending()
        self._deadlines.check_idle(now_s)
        if self._stillness and not self._crew.is_closed:
            self._check_stillness(self._stillness, now_s)
        for due_s, failed in self._consequences:
            if now_s >= due_s and not self._part.is_broken:
                self._membership.tell(failed)
        self._consequences = tuple(each for each in self._consequences if now_s < each[0])
        if now_s >= self._kill_s:
            self._kill_s = float("inf")
            for worker in self._pool.workers.values():
                if worker.is_condemned:
                    worker.signal(signal.SIGKILL)

    def _check_stillness(self, stillness: Stillness, now_s: float) -> None:
        """Tell of a program that does not get on."""
        is_open = self._part.opening is not None and not self._part.is_broken
        stillness.note_time(self._part.generation if is_open else -1, now_s)
        ranks = {
            self._part.rank(local_rank): worker
            for local_rank, worker in self._crew.ranks.items()
            if worker is not None and worker.generation == self._part.generation
        }
        if not is_open or not ranks or now_s < stillness.due_s:
            return
        if still := stillness.look(self._observe(list(ranks.values())), now_s):
            # One that is stopped is to blame, if there is any.
            rank = min(ranks, key=lambda each: (ranks[each].state() not in STOPPED_STATES, each))
            self._part.fail(rank, "hung", still.text, still.quiet_s)

    def _observe(self, workers: Sequence[Worker]) -> Observation:
        slots = [self._page.read(worker.slot) for worker in workers]
        steps = [slot.progress_s for slot in slots if slot.activity is not Activity.NOWHERE]
        pids = {worker.pid for worker in workers}
        return Observation(
            step_s=max(steps, default=None),
            output_s=max(
                worker.outputs[stream].read_s
                for worker in workers
                for stream in (WorkerStream.OUTPUT, WorkerStream.ERRORS)
            ),
            processor_s=sum_processor_s(read_processes(), pids),
        )


def _shell_status(worker: Worker) -> int:
    """Return the status that a shell would give for the end of the process."""
    if worker.status is None:
        return 1
    return worker.status if worker.status >= 0 else 128 - worker.status
