"""The agent of one node: starts, watches and replaces its workers, and talks to the coordinator.

One thread, which blocks until a process, a peer or a deadline wants something.
Membership is decided in `coordinator`, which of the workers hang in `hang`.
"""

from __future__ import annotations

import signal
import socket
import time
from dataclasses import replace
from typing import Any

from resilience.agent.coordination.coordinator import take_over
from resilience.agent.coordination.membership import State
from resilience.agent.coordination.succession import Succession
from resilience.agent.options import AgentOptions
from resilience.agent.processes.crew import Crew
from resilience.agent.processes.failures import Failures
from resilience.agent.processes.hang import STOPPED_STATES, find_hang, is_silent
from resilience.agent.processes.output import say
from resilience.agent.processes.workers import Worker, WorkerPool
from resilience.agent.services.services import Services
from resilience.agent.watch import Watch
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
from resilience.comm.page import Activity, Page
from resilience.events import EventLog
from resilience.state.report import Phase, fresh_report

LAST_WORDS_S = 5.0
"""How long workers may take to end by themselves once the run has failed."""
GOOD_END_S = 60.0
"""How long they may take once it has ended well: what follows a block may still write."""
_ASKED = "asked to end"
_STARTS_MAX = 3
"""Failed starts in a row that a run which has begun takes."""
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
        events: EventLog,
        listener: socket.socket,
        services: Services,
    ) -> None:
        self._options = options
        self._pool, self._services = pool, services
        self._page = page
        self._events = events
        self._watch = Watch()
        self._succession = Succession(
            self,
            node=options.node,
            host=options.host,
            listener=listener,
            selector=self._watch.selector,
            events=events,
            note=self._note,
        )
        self._crew = Crew(
            pool,
            page=page,
            watch=self._watch,
            num_local_ranks=options.coordinator.num_local_ranks,
            num_spares=options.num_spares,
            hear=self._hear_worker,
        )
        self._opening: Open | None = None
        self._is_broken, self._broken_s = False, 0.0
        self._reports: dict[int, Stopped] = {}
        self._is_joined, self._num_failed_starts = False, 0
        self._end: End | None = None
        self._end_s = self._killed_s = float("inf")
        self._failures = Failures()
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
        self._watch.add(self._pool, self._read_zygote)
        self._succession.begin(leader_address)
        self._watch.add(self._services, self._services.serve)
        self._services.begin(self._crew.start, self._leave)
        pause_s = min(0.5, max(0.02, self._options.hang_deadline_s / 8))
        while not self._is_done():
            self._watch.serve(pause_s)
            self._tick()
        assert self._end
        return self._end.status

    def stop(self, number: int) -> None:
        """Pass a signal on to the workers, which end after a common step.

        From here on no worker is replaced; who ignores the signal is ended after a while.
        """
        self._stop_status = 128 + number
        self._crew.is_closed = True
        for worker in self._pool.workers.values():
            worker.signal(number)
        if self._end is None:
            self._end_s = min(self._end_s, time.monotonic() + self._options.term_deadline_s)

    def _is_done(self) -> bool:
        if self._end is None:
            return False
        # A process that not even SIGKILL ends is in the kernel's hands, or a driver's.
        is_late = time.monotonic() >= self._killed_s + LAST_WORDS_S
        return is_late or all(worker.is_ended for worker in self._pool.workers.values())

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._succession.tick(now_s)
        self._services.serve()
        if now_s >= self._end_s:
            self._kill_all()
        elif self._end is None:
            if self._stop_status and not (self._opening and any(self._crew.ranks.values())):
                # Told until it is heard: the coordinator may be another one by now.
                self._end_as_asked(_ASKED)
            self._check_workers(now_s)
            if not self._is_broken:
                self._crew.refill(now_s, is_patient=self._opening is not None)

    def _kill_all(self) -> None:
        """End what is left at the end of a time limit."""
        if self._end is None:
            self._end_as_asked("workers did not stop in the grace period")
        for worker in self._pool.workers.values():
            if worker.rank is not None and self._end and self._end.status == 0:
                self._say(f"rank {worker.rank} did not end within {GOOD_END_S:g} s of the run")
            worker.signal(signal.SIGKILL)
        self._killed_s, self._end_s = time.monotonic(), float("inf")

    def _end_as_asked(self, text: str) -> None:
        """End the run, or leave it where this node is no part of it."""
        status = self._stop_status or 128 + signal.SIGTERM
        rank = self._rank(0)
        finished = Finished(generation=self._generation, rank=rank, status=status, text=text)
        self._succession.tell(finished)
        if self._end is None and not (self._is_member() and text == _ASKED):
            self._finish(End(status=status, reason=text))

    @property
    def _generation(self) -> int:
        return self._opening.generation if self._opening else -1

    # ---- the coordinator

    def make_state(self, lost: str | None, silent: frozenset[str]) -> State:
        """Return what a coordinator in this process would begin with."""
        options, now_s = self._options.coordinator, time.monotonic()
        if lost is None:
            return State(options=options, since_s=now_s)
        return take_over(
            options,
            generation=self._generation,
            layout=self._opening.layout if self._opening else None,
            lost=lost,
            silent=silent,
            now_s=now_s,
        )

    def lose_all(self) -> None:
        """End: without a coordinator nobody may go on."""
        reason = "the coordinator and all that could follow it are gone"
        self._finish(End(status=LOST_STATUS, reason=reason))

    def join(self) -> None:
        """Tell the coordinator of this node; it is done once its workers are warm."""
        if self._opening is None and not self._crew.is_whole:
            return
        self._is_joined = True
        self._succession.tell(
            Join(
                node=self._options.node,
                address=self._succession.address,
                generation=self._generation,
                layout=self._opening.layout if self._opening else None,
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
        """Take part in a generation, also in one of a lower number than this node has seen.

        That is of a coordinator which went on without this node; its reports say that
        the node's ranks hold nothing.
        """
        self._failures.open(opening)
        self._opening, self._is_broken = opening, False
        known, self._reports = self._reports, {}
        self._events.enter(opening.generation)
        self._crew.put_off_refill(time.monotonic())
        for local_rank, worker in self._crew.ranks.items():
            rank = opening.rank + local_rank
            if worker is None or worker.is_condemned:
                self._fail(rank, "died", f"rank {rank} ended before its generation began")
                continue
            worker.rank, worker.local_rank = rank, local_rank
            worker.generation = opening.generation
            worker.is_finished = False
            self._page.mark(worker.slot, 0, Activity.NOWHERE)
            worker.take_turn()
            report, told = opening.reports[rank], known.get(rank)
            is_fresh = report["phase"] == Phase.FRESH.value
            if not is_fresh and (told is None or told.report != report):
                # The generation counts on what a process held that is gone since.
                self._fail(rank, "died", f"rank {rank} was replaced as its generation began")
                self._report_fresh(worker)
                continue
            worker.send(replace(opening, rank=rank, local_rank=local_rank))

    def _break(self, order: Break) -> None:
        if order.generation != self._generation:
            return
        self._is_broken, self._broken_s = True, time.monotonic()
        # Whoever had finished is needed once more.
        self._crew.done.clear()
        self._replace_missing()
        for local_rank, worker in self._crew.ranks.items():
            rank = self._rank(local_rank)
            if rank in self._reports:
                # A new coordinator asks for what an earlier one was told.
                self._succession.tell(self._reports[rank])
            elif worker is None:
                continue
            elif worker.is_attached and worker.state() not in STOPPED_STATES:
                worker.send(order)
            else:
                worker.condemn(signal.SIGKILL)
        self._replace_missing()

    def _replace_rank(self, order: ReplaceRank) -> None:
        worker = self._crew.ranks.get(order.rank - self._rank(0))
        if worker is not None:
            self._say(f"replacing rank {order.rank}: {order.reason}")
            worker.condemn(signal.SIGKILL)

    def _finish(self, end: End) -> None:
        if self._end is not None:
            return
        self._succession.close()
        self._crew.is_closed = True
        self._end = end
        self._end_s = min(self._end_s, time.monotonic() + self._end_workers(end))
        if end.status:
            self._failures.show(self._say)
            self._say(f"the run ends with exit status {end.status}: {end.reason}")

    def _end_workers(self, end: End) -> float:
        """Have the workers end as the run does; returns how many seconds they have."""
        for worker in self._pool.workers.values():
            has_rank = worker.rank is not None and not worker.is_condemned
            if worker.is_finished or (has_rank and end.status == 0):
                worker.send(end)
            elif self._stop_status is None or not has_rank or worker.is_attached:
                worker.signal(signal.SIGKILL)
        return LAST_WORDS_S if end.status else GOOD_END_S

    # ---- workers

    def _rank(self, local_rank: int) -> int:
        return (self._opening.rank if self._opening else 0) + local_rank

    def _read_zygote(self) -> None:
        for worker in self._pool.read():
            self._bury(worker)
        if self._end is not None:
            # Asked for before the end, and come to life after it.
            for worker in self._pool.workers.values():
                if worker.rank is None:
                    worker.signal(signal.SIGKILL)

    def _hear_worker(self, worker: Worker, message: Message) -> None:
        if isinstance(message, Ready):
            worker.is_ready = True
            worker.is_attached = worker.is_attached or message.has_block
            self._num_failed_starts = 0
            self._replace_missing()
            return
        if worker.is_condemned or not self._crew.owns(worker):
            return
        if isinstance(message, Failed):
            self._failures.note(message)
            self._succession.tell(message)
        elif isinstance(message, Stopped):
            if message.generation == self._generation:
                self._reports[message.rank] = message
                self._succession.tell(message)
        elif isinstance(message, Finished):
            worker.is_finished = True
            self._succession.tell(message)

    def _replace_missing(self) -> None:
        """Give ranks without a process to spares, which hold no state, or have some started."""
        for spare in self._crew.assign():
            if self._is_member():
                spare.rank = self._rank(spare.local_rank or 0)
                spare.generation = self._generation + 1
                self._report_fresh(spare)
        self._crew.add_missing()
        if not self._is_joined and self._crew.is_whole:
            self.join()

    def _is_member(self) -> bool:
        return self._opening is not None and self._options.node in self._opening.layout.nodes

    def _report_fresh(self, worker: Worker) -> None:
        assert self._opening is not None
        rank = self._rank(worker.local_rank or 0)
        report = fresh_report(self._opening.layout, rank, self._generation)
        stopped = Stopped(generation=self._generation, rank=rank, report=report.to_json())
        self._reports[rank] = stopped
        self._note("worker_replaced", {"pid": worker.pid}, rank=rank)
        self._succession.tell(stopped)

    def _bury(self, worker: Worker) -> None:
        """Deal with a process that has ended."""
        self._pool.forget(worker, self._watch.drop)
        if self._end is not None:
            self._bury_late(worker, self._end)
            return
        if self._stop_status is not None:
            self._bury_asked(worker)
            return
        if not worker.is_ready:
            self._fail_start(worker)
            return
        if not self._crew.owns(worker):
            return
        local_rank = worker.local_rank or 0
        self._crew.ranks[local_rank] = None
        if self._opening is None or not self._is_member():
            self._replace_missing()
            return
        rank = self._rank(local_rank)
        self._reports.pop(rank, None)
        self._bury_rank(worker, rank)

    def _bury_rank(self, worker: Worker, rank: int) -> None:
        """Deal with a member's process that has ended."""
        if worker.status == 0 and not (worker.is_attached or self._is_broken):
            # A program without a block of its own that has come to its end.
            self._crew.done.add(worker.local_rank or 0)
            self._succession.tell(Finished(generation=self._generation, rank=rank, status=0))
            return
        if not worker.is_condemned:
            self._fail(rank, "died", f"rank {rank} {worker.describe_end()}")
        self._replace_missing()

    def _bury_late(self, worker: Worker, end: End) -> None:
        """Note that a rank failed after the run had ended well."""
        if end.status == 0 and worker.status != 0 and worker.rank is not None:
            status = worker.status if worker.status and worker.status > 0 else 1
            text = f"rank {worker.rank} {worker.describe_end()} after its last step"
            self._say(text)
            self._end = End(status=status, reason=text)

    def _bury_asked(self, worker: Worker) -> None:
        """Replace nobody any more; a program without a block may end in its own time."""
        if not self._crew.owns(worker):
            return
        self._crew.ranks[worker.local_rank or 0] = None
        others = [each for each in self._crew.ranks.values() if each is not None]
        if others and not any(each.is_attached for each in others) and not worker.is_attached:
            return
        self._end_as_asked(_ASKED)

    def _fail(self, rank: int, reason: str, text: str) -> None:
        failed = Failed(generation=self._generation, rank=rank, reason=reason, text=text)
        self._failures.note(failed)
        self._say(text)
        self._succession.tell(failed)

    def _fail_start(self, worker: Worker) -> None:
        """Try a start again in a run that has begun; then end it, or do without."""
        self._num_failed_starts += 1
        if self._opening is not None and self._num_failed_starts < _STARTS_MAX:
            self._crew.add_missing()
            return
        text = f"a worker of {self._options.node} {worker.describe_end()} before it was ready"
        self._give_up_start(worker, text)

    def _give_up_start(self, worker: Worker, text: str) -> None:
        """Do without spares, or leave the run."""
        if self._opening is not None and self._crew.is_whole:
            # The run has all that it needs now.
            self._say(f"{text}; the run goes on without spares on this node")
            self._crew.stop_refill()
            return
        self._leave(text, worker.status if worker.status and worker.status > 0 else 1)

    def _leave(self, text: str, status: int = 1) -> None:
        """Leave the place of a node that can start nothing any more to another one."""
        if self._opening is None:
            finished = Finished(generation=-1, rank=self._rank(0), status=status, text=text)
            self._succession.tell(finished)
        self._finish(End(status=status, reason=text))

    # ---- deadlines

    def _check_workers(self, now_s: float) -> None:
        """Do what is due about workers that do not get on."""
        self._check_progress(now_s)
        self._check_stopping(now_s)

    def _check_progress(self, now_s: float) -> None:
        """Break a generation in which no rank of this node gets on."""
        if self._opening is None or self._is_broken or not self._is_member():
            return
        workers = {
            self._rank(local_rank): worker
            for local_rank, worker in self._crew.ranks.items()
            if worker is not None and not worker.is_finished
        }
        slots = {rank: self._page.read(worker.slot) for rank, worker in workers.items()}
        deadline_s = self._options.hang_deadline_s
        getting_on = any(now_s - slot.progress_s < deadline_s for slot in slots.values())
        if getting_on and not any(is_silent(slot, now_s, deadline_s) for slot in slots.values()):
            return
        states = {rank: worker.state() for rank, worker in workers.items()}
        hang = find_hang(slots, states, now_s, deadline_s)
        if hang is None:
            return
        self._fail(hang.rank, "hung", hang.text)
        for rank in hang.stopped:
            workers[rank].condemn(signal.SIGKILL)

    def _check_stopping(self, now_s: float) -> None:
        """Replace who does not stop: it is stuck where nothing reaches it."""
        deadline_s = self._options.coordinator.stop_deadline_s
        if not self._is_broken or now_s - self._broken_s < deadline_s:
            return
        for local_rank, worker in self._crew.ranks.items():
            rank = self._rank(local_rank)
            if worker is not None and rank not in self._reports:
                self._say(f"rank {rank} did not stop within {deadline_s:g} s; it is replaced")
                worker.condemn(signal.SIGKILL)
        self._broken_s = now_s

    # ---- words

    def _note(self, event: str, fields: dict[str, Any], rank: int | None = None) -> None:
        self._events.write(event, rank=rank, **fields)

    def _say(self, text: str) -> None:
        say(self._options.node, text)
