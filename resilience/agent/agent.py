"""The agent of one node: starts, watches and replaces its workers, and talks to the coordinator.

One thread, which blocks until a process, a peer or a deadline wants something.
Membership is decided in `coordinator`, which of the workers hang in `hang`.
"""

from __future__ import annotations

import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from resilience.agent.coordinator import take_over
from resilience.agent.hang import find_hang
from resilience.agent.membership import State
from resilience.agent.options import AgentOptions
from resilience.agent.output import LineCutter, LogFolder
from resilience.agent.succession import Succession
from resilience.agent.workers import Worker, WorkerPool
from resilience.comm.messages import (
    Beat,
    Break,
    End,
    Failed,
    Finished,
    Join,
    Message,
    Open,
    Ready,
    ReplaceRank,
    Stopped,
)
from resilience.comm.page import Page, Place
from resilience.events import EventLog, EventLogError
from resilience.state.report import Phase, Report

LAST_WORDS_S = 5.0
"""How long workers may take to end by themselves once the run is over."""
_STARTS_MAX = 3
LOST_STATUS = 69
"""Exit status of an agent that found no coordinator any more."""


class Agent:
    """One node of the run."""

    def __init__(
        self,
        options: AgentOptions,
        *,
        pool: WorkerPool,
        page: Page,
        logs: LogFolder,
        events: EventLog,
        listener: socket.socket,
    ) -> None:
        self._options = options
        self._pool = pool
        self._page = page
        self._logs = logs
        self._events = events
        self._selector = selectors.DefaultSelector()
        self._succession = Succession(
            self,
            node=options.node,
            host=options.host,
            listener=listener,
            selector=self._selector,
            events=events,
            note=self._note,
        )
        self._ranks: dict[int, Worker | None] = dict.fromkeys(range(options.num_local_ranks))
        self._opening: Open | None = None
        self._is_broken = False
        self._broken_s = 0.0
        self._reports: dict[int, Stopped] = {}
        self._is_joined = False
        self._refill_s = 0.0
        self._num_failed_starts = 0
        self._end: End | None = None
        self._end_s = float("inf")
        self._first_failure: Failed | None = None
        self._stop_status: int | None = None
        """Exit status once somebody has asked the agent to end."""

    # ---- life

    @property
    def address(self) -> str:
        """Return where other agents reach this one."""
        return self._succession.address

    def run(self, leader_address: str) -> int:
        """Run until the job has ended; returns its exit status.

        Raises ConnectionError where no coordinator is there, ZygoteError where
        no worker can be started.
        """
        self._watch(self._pool, self._read_zygote)
        self._succession.begin(leader_address)
        for _ in range(self._options.num_local_ranks + self._options.num_spares):
            self._add_worker()
        while not self._is_done():
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            self._tick()
        assert self._end
        return self._end.status

    def stop(self, number: int) -> None:
        """Pass a signal on to the workers, which end after a common step."""
        self._stop_status = 128 + number
        for worker in self._pool.workers.values():
            worker.signal(number)
        if self._end is None:
            self._end_s = min(self._end_s, time.monotonic() + self._options.grace_s)

    def _is_done(self) -> bool:
        if self._end is None:
            return False
        return all(worker.is_ended for worker in self._pool.workers.values())

    def _pause_s(self) -> float:
        return min(0.5, max(0.02, self._options.hang_deadline_s / 8))

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._succession.tick(now_s)
        if now_s >= self._end_s:
            self._kill_all()
        elif self._end is None:
            self._check_progress(now_s)
            self._check_stopping(now_s)
            self._refill(now_s)

    def _kill_all(self) -> None:
        if self._end is None:
            status = 128 + signal.SIGTERM
            self._end = End(status=status, reason="workers did not stop in the grace period")
            self._succession.tell(
                Finished(generation=self._generation, rank=0, status=status, text="stopped")
            )
        for worker in self._pool.workers.values():
            worker.signal(signal.SIGKILL)

    @property
    def _generation(self) -> int:
        return self._opening.generation if self._opening else -1

    def _watch(self, what: object, callback: Callable[[], None]) -> None:
        self._selector.register(what, selectors.EVENT_READ, callback)  # type: ignore[arg-type]

    def _unwatch(self, file: int) -> None:
        try:
            self._selector.unregister(file)
        except KeyError:
            return

    # ---- the coordinator

    def make_state(self, lost: str | None) -> State:
        """Return what a coordinator in this process would begin with."""
        options, now_s = self._options.coordinator, time.monotonic()
        if self._opening is None or lost is None:
            return State(options=options, since_s=now_s)
        nodes = self._opening.nodes
        return take_over(options, generation=self._generation, nodes=nodes, lost=lost, now_s=now_s)

    def lose_all(self) -> None:
        """End: without a coordinator nobody may go on."""
        if self._end is None:
            reason = "the coordinator and all that could follow it are gone"
            self._finish(End(status=LOST_STATUS, reason=reason))

    def join(self) -> None:
        """Tell the coordinator of this node; it is done once its workers are warm."""
        if None in self._ranks.values() and self._opening is None:
            return
        index = -1
        if self._opening is not None and self._options.node in self._opening.nodes:
            index = self._opening.nodes.index(self._options.node)
        self._is_joined = True
        self._succession.tell(
            Join(
                node=self._options.node,
                address=self._succession.address,
                generation=self._generation,
                index=index,
            )
        )

    # ---- what the coordinator says

    def hear(self, message: Message) -> None:
        """Do what the coordinator says."""
        if isinstance(message, Beat):
            self._succession.take_roster(message)
        elif isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Break):
            self._break(message)
        elif isinstance(message, ReplaceRank):
            self._replace_rank(message)
        elif isinstance(message, End):
            self._finish(message)

    def _open(self, opening: Open) -> None:
        self._opening, self._is_broken = opening, False
        self._reports.clear()
        self._events.generation = opening.generation
        self._refill_s = time.monotonic() + self._options.refill_delay_s
        for local_rank, worker in self._ranks.items():
            rank = opening.rank + local_rank
            if worker is None:
                self._fail(rank, "died", f"rank {rank} ended before its generation began")
                continue
            worker.rank, worker.local_rank = rank, local_rank
            worker.generation = opening.generation
            self._page.mark(worker.slot, 0, Place.NOWHERE)
            worker.send(replace(opening, rank=rank, local_rank=local_rank))

    def _break(self, order: Break) -> None:
        if order.generation != self._generation:
            return
        self._is_broken, self._broken_s = True, time.monotonic()
        for local_rank, worker in self._ranks.items():
            rank = self._rank(local_rank)
            if rank in self._reports:
                # A new coordinator asks for what an earlier one was told.
                self._succession.tell(self._reports[rank])
            elif worker is None:
                continue
            elif worker.is_attached:
                worker.send(order)
            else:
                self._condemn(worker)

    def _condemn(self, worker: Worker) -> None:
        """End a worker on purpose: its death is no fault of its own."""
        worker.is_condemned = True
        worker.signal(signal.SIGKILL)

    def _replace_rank(self, order: ReplaceRank) -> None:
        worker = self._ranks.get(order.rank - self._rank(0))
        if worker is not None:
            self._say(f"replacing rank {order.rank}: {order.reason}")
            self._condemn(worker)

    def _finish(self, end: End) -> None:
        self._end, self._end_s = end, time.monotonic() + LAST_WORDS_S
        for worker in self._pool.workers.values():
            if worker.is_finished or (worker.rank is not None and end.status == 0):
                worker.send(end)
            else:
                worker.signal(signal.SIGKILL)
        if end.status:
            self._show_failure(end)

    def _show_failure(self, end: End) -> None:
        """Say why the run ended, the first traceback first."""
        if (first := self._first_failure) and first.details:
            self._say(f"first failure: rank {first.rank}, generation {first.generation}")
            sys.stderr.write(first.details.rstrip() + "\n")
        self._say(f"the run ends with exit status {end.status}: {end.reason}")

    # ---- workers

    def _rank(self, local_rank: int) -> int:
        return (self._opening.rank if self._opening else 0) + local_rank

    def _add_worker(self) -> None:
        worker = self._pool.fork()
        self._page.clear(worker.slot)
        self._watch(worker.socket, lambda: self._read_worker(worker))
        for output, is_error in zip(worker.outputs, (False, True), strict=True):
            self._watch_output(worker, output, is_error=is_error)

    def _watch_output(self, worker: Worker, output: LineCutter, *, is_error: bool) -> None:
        def read() -> None:
            lines, is_open = output.read()
            self._pool.print(worker, lines, is_error=is_error)
            if not is_open:
                self._unwatch(output.file)

        self._watch(output.file, read)

    def _read_zygote(self) -> None:
        for worker in self._pool.read():
            self._bury(worker)

    def _read_worker(self, worker: Worker) -> None:
        messages = worker.read()
        if messages is None:
            # The end of the process follows.
            self._unwatch(worker.socket.fileno())
            return
        for message in messages:
            self._hear_worker(worker, message)

    def _hear_worker(self, worker: Worker, message: Message) -> None:
        if isinstance(message, Ready):
            worker.is_ready = True
            worker.is_attached = worker.is_attached or message.has_block
            self._num_failed_starts = 0
            self._assign_spares()
            return
        if worker.local_rank is None or self._ranks[worker.local_rank] is not worker:
            return
        if isinstance(message, Failed):
            self._first_failure = self._first_failure or message
            self._succession.tell(message)
        elif isinstance(message, Stopped):
            if message.generation == self._generation:
                self._reports[message.rank] = message
                self._succession.tell(message)
        elif isinstance(message, Finished):
            worker.is_finished = True
            self._succession.tell(message)

    def _assign_spares(self) -> None:
        """Give ranks without a process to spares; such a rank holds no state."""
        for local_rank, worker in self._ranks.items():
            if worker is not None:
                continue
            spare = next((each for each in self._pool.workers.values() if _is_spare(each)), None)
            if spare is None:
                break
            spare.local_rank = local_rank
            self._ranks[local_rank] = spare
            if self._opening and self._is_member():
                spare.rank = self._rank(local_rank)
                self._report_fresh(spare)
        if not self._is_joined and None not in self._ranks.values():
            self.join()

    def _is_member(self) -> bool:
        return self._opening is not None and self._options.node in self._opening.nodes

    def _report_fresh(self, worker: Worker) -> None:
        rank = self._rank(worker.local_rank or 0)
        report = Report(
            rank=rank, node=self._options.node, generation=self._generation, phase=Phase.FRESH
        )
        stopped = Stopped(generation=self._generation, rank=rank, report=report.to_json())
        self._reports[rank] = stopped
        self._note("worker_replaced", {"pid": worker.pid}, rank=rank)
        self._succession.tell(stopped)

    def _bury(self, worker: Worker) -> None:
        """Deal with a process that has ended."""
        self._pool.forget(worker, self._unwatch)
        if self._end is not None:
            return
        if self._stop_status is not None and not (self._succession.leader or self._is_member()):
            self._finish(End(status=self._stop_status, reason="asked to end"))
            return
        if not worker.is_ready:
            self._fail_start(worker)
            return
        local_rank = worker.local_rank
        if local_rank is None or self._ranks[local_rank] is not worker:
            return
        self._ranks[local_rank] = None
        if self._opening is None or not self._is_member():
            self._assign_spares()
            self._add_missing()
            return
        rank = self._rank(local_rank)
        self._reports.pop(rank, None)
        if worker.status == 0 and not worker.is_attached:
            # A program without a block of its own that has come to its end.
            self._succession.tell(Finished(generation=self._generation, rank=rank, status=0))
            return
        if not worker.is_condemned:
            self._fail(rank, "died", f"rank {rank} {worker.describe_end()}")
        self._assign_spares()
        self._add_missing()

    def _fail(self, rank: int, reason: str, text: str) -> None:
        failed = Failed(generation=self._generation, rank=rank, reason=reason, text=text)
        self._first_failure = self._first_failure or failed
        self._say(text)
        self._succession.tell(failed)

    def _fail_start(self, worker: Worker) -> None:
        """Try a start again, in case it was memory or luck; the next would end there as well."""
        self._num_failed_starts += 1
        if self._opening is None or self._num_failed_starts >= _STARTS_MAX:
            status = worker.status if worker.status and worker.status > 0 else 1
            status = self._stop_status or status
            text = f"a worker of {self._options.node} {worker.describe_end()} before it was ready"
            if self._opening is None or self._is_joined:
                self._succession.tell(
                    Finished(
                        generation=self._generation, rank=self._rank(0), status=status, text=text
                    )
                )
            self._finish(End(status=status, reason=text))
            return
        self._add_missing()

    def _add_missing(self) -> None:
        """Start processes for ranks that have none; spares follow later."""
        num_missing = sum(worker is None for worker in self._ranks.values())
        num_coming = sum(_is_coming(worker) for worker in self._pool.workers.values())
        for _ in range(num_missing - num_coming):
            self._add_worker()

    def _refill(self, now_s: float) -> None:
        if now_s < self._refill_s or self._is_broken or not self._pool.is_zygote_ready:
            return
        num_waiting = sum(
            _is_spare(worker) or _is_coming(worker) for worker in self._pool.workers.values()
        )
        if num_waiting < self._options.num_spares:
            self._refill_s = now_s + self._options.refill_delay_s
            self._add_worker()

    # ---- deadlines

    def _check_progress(self, now_s: float) -> None:
        """Break a generation in which no rank of this node gets on."""
        if self._opening is None or self._is_broken or not self._is_member():
            return
        workers = {
            self._rank(local_rank): worker
            for local_rank, worker in self._ranks.items()
            if worker is not None and not worker.is_finished
        }
        slots = {rank: self._page.read(worker.slot) for rank, worker in workers.items()}
        deadline_s = self._options.hang_deadline_s
        if any(now_s - slot.progress_s < deadline_s for slot in slots.values()):
            return
        states = {rank: _process_state(worker.pid) for rank, worker in workers.items()}
        hang = find_hang(slots, states, now_s, deadline_s)
        if hang is None:
            return
        self._fail(hang.rank, "hung", hang.text)
        for rank in hang.stopped:
            self._condemn(workers[rank])

    def _check_stopping(self, now_s: float) -> None:
        """Replace who does not stop: it is stuck where nothing reaches it."""
        if not self._is_broken or now_s - self._broken_s < self._options.stop_deadline_s:
            return
        for local_rank, worker in self._ranks.items():
            rank = self._rank(local_rank)
            if worker is not None and rank not in self._reports:
                self._say(
                    f"rank {rank} did not stop within {self._options.stop_deadline_s:g} s; "
                    "it is replaced"
                )
                self._condemn(worker)
        self._broken_s = now_s

    # ---- words

    def _note(self, event: str, fields: dict[str, Any], rank: int | None = None) -> None:
        try:
            self._events.write(event, rank=rank, **fields)
        except EventLogError:
            # A full disk is no reason to stop a run that survives without its record.
            return

    def _say(self, text: str) -> None:
        sys.stderr.write(f"resilience.agent {self._options.node}: {text}\n")
        sys.stderr.flush()


def _is_spare(worker: Worker) -> bool:
    return worker.is_ready and worker.local_rank is None and not worker.is_ended


def _is_coming(worker: Worker) -> bool:
    return not worker.is_ready and not worker.is_ended


def _process_state(pid: int) -> str:
    """Return the letter of the process's state, empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
