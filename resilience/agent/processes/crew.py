"""The node's workers by what they are for: those with a rank, spares, and those to come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from resilience.agent.processes.output import WorkerStream
from resilience.agent.processes.worker import Worker
from resilience.agent.processes.workers import WorkerPool
from resilience.agent.processes.zygote_process import ZygoteLostError
from resilience.agent.watch import Watch
from resilience.comm.messages import Message
from resilience.comm.page import Page

_REFILL_DELAY_S = 1.0
"""How long after an opening the next spare is made: the run comes first."""


class Crew:
    """Gives local ranks to warm processes, and starts as many as are needed."""

    def __init__(
        self,
        pool: WorkerPool,
        *,
        page: Page,
        watch: Watch,
        num_local_ranks: int,
        num_spares: int,
        hear: Callable[[Worker, Message], None],
        bury: Callable[[Worker], None],
        warn: Callable[[str], None],
    ) -> None:
        self.pool = pool
        self.ranks: dict[int, Worker | None] = dict.fromkeys(range(num_local_ranks))
        self.done: set[int] = set()
        """Local ranks whose program has come to its end, and is not run again."""
        self.is_closed = False
        """No worker gets a rank any more, and none is started."""
        self._page = page
        self._watch = watch
        self._num_spares = num_spares
        self._refill_s = 0.0
        self._hear, self._bury, self._warn = hear, bury, warn

    @property
    def is_whole(self) -> bool:
        """Return whether each local rank has a process."""
        return None not in self.ranks.values()

    @property
    def coming(self) -> list[Worker]:
        """Return the processes that are not ready yet."""
        return [worker for worker in self.pool.workers.values() if _is_coming(worker)]

    def watch_zygote(self) -> None:
        """Hear from now on what becomes of processes that are asked for."""
        self._watch.add(self.pool, self._read_zygote)

    def start(self) -> None:
        """Start the first processes, unless the run has ended before them."""
        if self.is_closed:
            return
        for _ in range(len(self.ranks) + self._num_spares):
            self._add()

    def owns(self, worker: Worker) -> bool:
        """Return whether the worker has a local rank and is the one who has it."""
        return worker.local_rank is not None and self.ranks[worker.local_rank] is worker

    def assign(self) -> list[Worker]:
        """Give local ranks without a process to spares; returns these."""
        assigned: list[Worker] = []
        if self.is_closed:
            return assigned
        spares = [each for each in self.pool.workers.values() if _is_spare(each)]
        for local_rank, worker in self.ranks.items():
            if worker is None and spares and local_rank not in self.done:
                spare = spares.pop(0)
                spare.take_place(local_rank)
                self.ranks[local_rank] = spare
                assigned.append(spare)
        return assigned

    def add_missing(self) -> None:
        """Start processes for local ranks that have none; spares follow later."""
        if self.is_closed:
            return
        num_missing = sum(
            worker is None and local_rank not in self.done
            for local_rank, worker in self.ranks.items()
        )
        coming = self.coming
        if num_missing:
            for worker in coming:
                worker.take_turn()
        for _ in range(num_missing - len(coming)):
            self._add()

    def close(self) -> None:
        """Give no rank to anybody any more, and start nothing."""
        self.is_closed = True

    def put_off_refill(self, now_s: float) -> None:
        """Leave the machine to those that begin a generation."""
        self._refill_s = max(self._refill_s, now_s + _REFILL_DELAY_S)

    def stop_refill(self) -> None:
        """Make no more spares: they do not come to life."""
        self._refill_s = float("inf")

    def refill(self, now_s: float, *, is_patient: bool) -> None:
        """Make another spare where one is missing and it is time."""
        if self.is_closed or now_s < self._refill_s or not self.pool.is_zygote_ready:
            return
        workers = self.pool.workers.values()
        if sum(_is_spare(each) or _is_coming(each) for each in workers) < self._num_spares:
            self._refill_s = now_s + _REFILL_DELAY_S
            self._add(is_patient=is_patient)

    def _read_zygote(self) -> None:
        try:
            worker = self.pool.read()
        except ZygoteLostError as lost:
            self._renew_zygote(lost)
            return
        if worker is None:
            return
        if worker.is_ended:
            self._let_go(worker)
        else:
            self._watch.add(worker.end_file, lambda: self._note_end(worker))

    def _renew_zygote(self, lost: ZygoteLostError) -> None:
        self._watch.drop(self.pool.fileno())
        unforked = self.pool.renew(lost)
        self.watch_zygote()
        self._warn(f"{lost}; another one is started, and the workers live on")
        for worker in unforked:
            self._let_go(worker)

    def _note_end(self, worker: Worker) -> None:
        worker.bury()
        # What it has said before its end counts.
        while messages := worker.read():
            for message in messages:
                self._hear(worker, message)
        self._let_go(worker)

    def _let_go(self, worker: Worker) -> None:
        self.pool.forget(worker, self._watch.drop)
        self._bury(worker)

    def _add(self, *, is_patient: bool = False) -> None:
        worker = self.pool.fork(is_patient=is_patient)
        self._page.clear(worker.slot)
        self._watch.add(worker.socket, lambda: self._read(worker))
        for stream, output in worker.outputs.items():
            self._watch.add(output.file, partial(self._read_output, worker, stream))

    def watch_unsent(self) -> None:
        """Hear of workers that can take more, as long as there is more for them."""
        for worker in self.pool.workers.values():
            self._watch.watch_writing(worker.socket.fileno(), is_wanted=bool(worker.unsent))

    def _read_output(self, worker: Worker, stream: WorkerStream) -> None:
        output = worker.outputs[stream]
        lines, is_open = output.read()
        self.pool.take(worker, lines, stream)
        if not is_open:
            self._watch.drop(output.file)

    def _read(self, worker: Worker) -> None:
        worker.flush()
        # What it noted before it spoke stands in the log before what follows from its words.
        self._read_output(worker, WorkerStream.EVENTS)
        messages = worker.read()
        if messages is None:
            # The end of the process follows.
            self._watch.drop(worker.socket.fileno())
            return
        for message in messages:
            self._hear(worker, message)


def _is_spare(worker: Worker) -> bool:
    return worker.is_ready and worker.local_rank is None and not worker.is_ended


def _is_coming(worker: Worker) -> bool:
    return not worker.is_ready and not worker.is_ended
