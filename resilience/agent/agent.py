"""The agent of one node: starts, watches and replaces its workers, and talks to the coordinator.

One thread, which blocks until a process, a peer or a deadline wants something.
Membership is decided in `coordinator`. What the node's ranks hold is kept in `part`, what is due
about them is done in `deadlines`, and how it all ends in `ending`.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from resilience.agent.connections.transport import Transport
from resilience.agent.coordination.coordinator import take_over
from resilience.agent.coordination.events import Note
from resilience.agent.coordination.membership import State
from resilience.agent.coordination.node import MembershipNode
from resilience.agent.coordination.view import MembershipView, find_endpoint_order
from resilience.agent.deadlines import Deadlines
from resilience.agent.departure import DEPARTED, LET_GO, Departure
from resilience.agent.ending import ASKED, Ending
from resilience.agent.evidence.earlier import StartedAgain
from resilience.agent.evidence.folder import RunFolder
from resilience.agent.evidence.node_states import NodeStates
from resilience.agent.evidence.removal import REMOVED, REMOVED_STATUS, FolderWatch
from resilience.agent.options import AgentOptions
from resilience.agent.part import NodePart
from resilience.agent.processes.crew import Crew
from resilience.agent.processes.output import Console
from resilience.agent.processes.starts import Tries
from resilience.agent.processes.worker import Worker
from resilience.agent.processes.workers import WorkerPool
from resilience.agent.services.services import Services
from resilience.agent.watch import Watch
from resilience.comm import messages
from resilience.comm.messages import GAVE_UP_STATUS, Message
from resilience.comm.page import Activity, Page
from resilience.events import EventLog

_FOLDER_WORD_S = 10.0
"""A run's folder that is silent for longer is named."""


class Agent(ABC):
    """One node of the run."""

    def __init__(
        self,
        options: AgentOptions,
        *,
        pool: WorkerPool,
        page: Page,
        events: EventLog,
        transport: Transport,
        folder: RunFolder,
        services: Services,
        console: Console,
    ) -> None:
        self._options, self._departure = options, Departure(options)
        self._pool, self._services = pool, services
        self._page = page
        self._watch = Watch()
        self._say = console.say
        self._events = events
        self._folder, self._removal = folder, FolderWatch(options.made, folder.is_other)
        self._transport = transport
        self._node_states = NodeStates(
            options.node_state_command or (), patience_s=options.coordinator.partition_patience_s
        )
        self._membership = self._make_membership()
        self._part = NodePart(
            options.node, folder.start, tell=self._membership.tell, say=self._say, events=events
        )
        self._crew = Crew(
            pool,
            page=page,
            watch=self._watch,
            num_local_ranks=options.coordinator.num_local_ranks,
            num_spares=options.num_spares,
            hear=self._hear_worker,
            bury=self._bury,
            warn=self._part.warn,
        )
        self.ending = Ending(
            self._crew,
            self._part,
            self._membership,
            console,
            options=options,
            end_workers=self._end_workers,
        )
        self._deadlines = Deadlines(
            self._crew,
            self._part,
            page,
            options=options,
            say=self._say,
            leave=self.ending.leave,
        )
        self._tries, self._is_joined = Tries(), False
        self._is_out = False
        """Whether others can know of this agent."""
        self._folder_s = time.monotonic()
        """When the folder had answered all questions for the last time."""
        self._is_folder_named = False

    def _make_membership(self) -> MembershipNode:
        options = self._options
        address, endpoints = self._transport.address, options.endpoints
        hello = messages.Hello(
            run=options.run_id,
            node=options.node,
            address=address,
            start=self._folder.start,
            order=find_endpoint_order(address, endpoints),
        )
        view = MembershipView(
            hello=hello,
            endpoints=endpoints,
            lease_s=options.coordinator.lease_s,
            tick_s=time.monotonic(),
            program=options.program,
        )
        return MembershipNode(
            self,
            view,
            transport=self._transport,
            records=self._folder,
            note=self._write_note,
            clock=time.monotonic,
            doubt=self._doubt,
        )

    def _write_note(self, note: Note, generation: int) -> None:
        """Write what the coordinator here has noticed."""
        self._events.enter(generation)
        self._events.write(note.event, rank=note.rank, **note.fields)
        if words := note.words:
            self._say(words)

    # ---- life

    def run(self) -> int:
        """Run until the job has ended; returns its exit status.

        Raises ZygoteError where no worker can start.
        """
        self._crew.watch_zygote()
        self._watch.add(self._folder, self._hear_evidence)
        self._watch.add(self._node_states, self._hear_evidence)
        self._watch.add(self._services, self._services.serve)
        self._services.begin(self._crew.start, self.ending.give_up)
        options = self._options
        # An agent that looks less often takes itself for one that stood still.
        soon_s = min(options.hang_deadline_s / 8, options.coordinator.lease_s / 6)
        pause_s = min(0.5, max(0.02, soon_s))
        while not self.ending.is_over():
            due_s = self._membership.due_s - time.monotonic() if self._is_out else pause_s
            self._crew.watch_unsent()
            self._watch.serve(max(0.0, min(pause_s, due_s)))
            self._tick()
        assert self.ending.end
        status = self.ending.end.status
        return REMOVED_STATUS if self._removal.close() and status else status

    def stop(self, number: int) -> None:
        """End the node's part in the run: of an elastic one without the others, else with them."""
        if not self._departure.ask(number):
            self._stop_run(number)

    def drain(self, order: messages.Drain) -> str:
        """Have this node alone leave the run, as it does on SIGTERM; returns why it stays."""
        if order.node != self._options.node:
            return f"node {self._options.node!r} is there"
        if self.ending.end is not None or self.ending.stop_status is not None:
            return "its run ends"
        return self._departure.ask_alone(signal.SIGTERM)

    def _stop_run(self, number: int, status: int | None = None, why: str = ASKED) -> None:
        """Pass the signal on to the workers, which end after a common step.

        From then on no worker is replaced; who ignores the signal is ended after a while.
        """
        self.ending.ask(status or 128 + number, self._options.grace_s, why)
        self._crew.close()
        for worker in self._pool.workers.values():
            self._page.ask_to_end(worker.slot)
            worker.signal(number)

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._check_folder(now_s)
        self._depart(now_s)
        if self._is_out:
            self._membership.tick()
        self._services.serve()
        self._pool.reap()
        self.ending.check(now_s)
        if self.ending.end is None:
            self._check_workers(now_s)
            if not self._part.is_broken:
                self._crew.refill(now_s, is_patient=self._part.opening is not None)

    def _depart(self, now_s: float) -> None:
        """Leave the run as the node was asked to, once the others go on without it."""
        departure = self._departure
        if departure.signal is None or self.ending.end is not None:
            return
        status = 128 + departure.signal
        if not self._part.is_member:
            self.ending.leave(DEPARTED, status)
        elif departure.is_over(now_s):
            text = "this node was to leave the run, and the others did not let it go in time"
            self.ending.leave(text, status)
        elif departure.is_new():
            self._events.write("node_leaving")
            self.join()

    def _check_folder(self, now_s: float) -> None:
        """Let others know of this agent once its word is in the run's folder: they look for it."""
        self._folder.look_for_later(now_s)
        is_asked = self.ending.end is not None or self.ending.stop_status is not None
        if self._removal.is_removed and not is_asked:
            self._say(f"{REMOVED}; the run saves its state to its tiers, and ends")
            self._stop_run(signal.SIGTERM, REMOVED_STATUS, REMOVED)
        if self._folder.is_known:
            self._folder_s, self._is_folder_named = now_s, False
            if not self._is_out:
                self._is_out = True
                self._watch.add(self._transport, self._membership.serve)
        elif not self._is_joined and self.ending.end is None:
            waited_s, limit_s = now_s - self._folder_s, self._options.coordinator.join_deadline_s
            if waited_s >= limit_s:
                text = f"--run-dir has not answered within {limit_s:g} s"
                self.ending.give_up(text, GAVE_UP_STATUS)
            elif waited_s >= _FOLDER_WORD_S and not self._is_folder_named:
                self._is_folder_named = True
                self._say("waits for --run-dir, which does not answer")

    def _hear_evidence(self) -> None:
        """Take in what the folder of the run says, and the platform of silent nodes."""
        was_shared = self._folder.is_shared
        for answer in (*self._folder.answers(), *self._node_states.answers()):
            if isinstance(answer, StartedAgain):
                self.ending.void(f"the scheduler has started the run again, as {answer.name}")
            else:
                self._membership.answer(answer)
        is_news = self._is_joined and was_shared != self._folder.is_shared
        is_late = not self._is_joined and self._part.opening is None and self._folder.is_known
        if is_late or (is_news and not self._part.is_member):
            self.join()

    def _doubt(self, doubted: Mapping[str, frozenset[str]]) -> None:
        """Look for evidence that silent agents have ended."""
        self._folder.check(doubted)
        self._node_states.ask(doubted)

    def leave(self) -> None:
        """Say goodbye to the others, once the workers have ended."""
        if self._departure.signal is not None:
            self._events.write("node_left")
        self._membership.leave("the agent has ended")
        self._transport.close()
        self._node_states.close()
        has_processes = not all(each.is_ended for each in self._pool.workers.values())
        self._folder.close(has_processes=has_processes)

    # ---- the coordinator

    def make_state(self, lost: str, dead: frozenset[str], known: frozenset[str]) -> State:
        """Return what a coordinator in this process would begin with."""
        options, standing, now_s = self._options.coordinator, self._part.standing, time.monotonic()
        return take_over(options, standing, lost=lost, dead=dead, known=known, now_s=now_s)

    def join(self) -> None:
        """Tell the coordinator of this node, once its workers are warm.

        And before the run has begun, once the folder has said whether it is common: a run that
        begins without its record is unknown to whoever comes to the folder later.
        """
        is_safe = self._part.standing.opened >= 0 or self._folder.is_known
        self._is_joined = self._part.opening is not None or (self._crew.is_whole and is_safe)
        if self._is_joined:
            sees_folder = self._folder.is_shared
            join = self._part.join(self._transport.address, sees_folder=sees_folder)
            within_s = self._departure.left_s(time.monotonic())
            self._membership.tell(replace(join, leaves_within_s=within_s))

    # ---- what the coordinator says

    def obey(self, message: Message) -> None:
        """Do what the coordinator says; raises ValueError for what is no order."""
        match message:
            case messages.Propose():
                if agreement := self._part.consider(message):
                    head = self._options.find_head(message.generation)
                    self._membership.tell(replace(agreement, head=head))
            case messages.Learn():
                self._learn(message)
            case messages.Open():
                self._open(message)
            case messages.Break():
                self._break(message)
            case messages.Leave():
                self._ask_to_leave(message)
            case messages.StopRun() | messages.LetGo():
                self._end_departure(message)
            case messages.ReplaceRank():
                self._replace_rank(message)
            case messages.SaveState():
                self._save(message)
            case messages.End():
                self.ending.finish(message)
            case _:
                raise ValueError(f"{type(message).__name__} is no order to an agent")

    def _end_departure(self, order: messages.StopRun | messages.LetGo) -> None:
        number = self._departure.signal
        if number is not None and isinstance(order, messages.StopRun):
            self._stop_run(number)
        elif number is not None:
            self.ending.leave(LET_GO, 128 + number)

    def reply(self, reply: messages.StoreReply) -> None:
        """Pass on what the store of a generation replies to a worker's call."""
        if worker := self._pool.workers.get(reply.worker):
            worker.send(reply)

    def _open(self, opening: messages.Open) -> None:
        """Take part in a generation, unless the node has heard of one after it."""
        if opening.generation <= self._part.generation:
            return
        place = opening.layout.index_of(self._options.node)
        opening = replace(opening, rank=opening.layout.ranks_of(place).start)
        self._part.open(opening)
        self._membership.move(opening.generation, opening.layout)
        self._events.enter(opening.generation)
        self._crew.put_off_refill(time.monotonic())
        for local_rank, worker in self._crew.ranks.items():
            rank = opening.rank + local_rank
            if worker is None or worker.is_condemned:
                self._part.fail(rank, "died", f"rank {rank} ended before its generation began")
                continue
            worker.enter(rank, opening.generation, opening.layout.seat(rank).shard)
            self._page.mark(worker.slot, 0, Activity.NOWHERE)
            worker.take_turn()
            if self._part.has_lost(rank):
                self._part.fail(rank, "died", f"rank {rank} was replaced as its generation began")
                self._part.report_fresh(worker)
                continue
            worker.begin(replace(opening, rank=rank, local_rank=local_rank))

    def _ask_to_leave(self, order: messages.Leave) -> None:
        """Let one worker ask all ranks to leave the generation after a step."""
        worker = self._crew.ranks[0]
        if worker is not None and order.generation == self._part.generation:
            worker.send(order)

    def _learn(self, news: messages.Learn) -> None:
        """Take note of a newer generation; without a place there the workers wait for one."""
        if news.generation <= self._part.generation:
            return
        self._part.learn(news)
        self._membership.move(news.generation, news.layout)
        if self._part.opening is not None:
            self._stop_workers("the run has gone on without this node's workers")
        if self._part.is_member:
            self._part.report_rest(self._crew.ranks)

    def _stop_workers(self, reason: str) -> None:
        """Have the workers stop, and tell what they hold."""
        order = self._part.own_break(reason)
        self._part.end()
        self._part.tell_left()
        # Whoever had finished is needed once more.
        self._crew.done.clear()
        self._replace_missing()
        for local_rank, worker in self._crew.ranks.items():
            rank = self._part.rank(local_rank)
            if rank in self._part.reports:
                # A new coordinator asks for what an earlier one was told.
                self._part.report(self._part.reports[rank])
            elif worker and worker.within is None and not self._deadlines.is_stuck(worker):
                # It waits for a place, and holds nothing.
                continue
            elif worker and worker.is_attached and not self._deadlines.is_stuck(worker):
                worker.send(order)
            elif worker:
                worker.condemn(signal.SIGKILL)
        self._replace_missing()

    def _replace_rank(self, order: messages.ReplaceRank) -> None:
        worker = self._crew.ranks.get(order.rank - self._part.rank(0))
        if worker is not None:
            self._say(f"replacing rank {order.rank}: {order.reason}")
            worker.condemn(signal.SIGKILL)

    def _save(self, order: messages.SaveState) -> None:
        """Have a rank that has stopped save what it holds."""
        worker = self._crew.ranks.get(order.rank - self._part.rank(0))
        is_current = order.generation == self._part.generation and order.rank in self._part.reports
        if worker is not None and is_current:
            worker.send(order)

    # ---- workers

    def _hear_worker(self, worker: Worker, message: Message) -> None:
        if isinstance(message, messages.StoreRequest):
            self._membership.ask_store(replace(message, worker=worker.number))
            return
        if isinstance(message, messages.Ready) and (worker.is_ready or not worker.is_condemned):
            self._deadlines.note_ready(worker)
            worker.note_ready(has_block=message.has_block)
            self._part.note_ready(has_block=message.has_block)
            self._tries.note_ready(has_block=message.has_block)
            self._replace_missing()
            return
        if worker.is_condemned or not self._crew.owns(worker):
            return
        if isinstance(message, messages.Failed):
            self._part.pass_on(message)
        elif isinstance(message, messages.Stopped):
            worker.note_stopped(message.generation)
            if message.generation == self._part.standing.opened:
                self._part.report(self._part.relabel(message))
        elif isinstance(message, messages.Finished):
            worker.note_finished(is_done=message.is_done)
            self._membership.tell(self._part.relabel(message))
        elif isinstance(message, messages.StateSaved):
            self._membership.tell(message)

    def _replace_missing(self) -> None:
        """Give ranks without a process to spares, which hold no state, or have some started."""
        for spare in self._crew.assign():
            if self._part.is_member:
                spare.enter(self._part.rank(spare.local_rank or 0), self._part.generation + 1)
                self._part.report_fresh(spare)
        self._crew.add_missing()
        if not self._is_joined and self._crew.is_whole:
            self.join()

    def _bury(self, worker: Worker) -> None:
        """Deal with a process that has ended."""
        if self.ending.end is not None:
            self.ending.note_late(worker)
        elif self.ending.stop_status is not None:
            self.ending.note_asked(worker)
        elif not worker.is_ready:
            self._fail_start(worker)
        elif self._crew.owns(worker):
            self._bury_owner(worker)

    def _bury_owner(self, worker: Worker) -> None:
        """Deal with the end of a process that has one of the node's places."""
        local_rank = worker.local_rank or 0
        self._crew.ranks[local_rank] = None
        rank = self._part.rank(local_rank)
        self._part.reports.pop(rank, None)
        if self._part.opening is None or not self._part.is_member:
            self._replace_missing()
            return
        self._bury_rank(worker, rank)

    def _fail_start(self, worker: Worker) -> None:
        """Try a start again, unless it would fail again or has too often."""
        problem = self._tries.give_up_process(worker, self._pool.newest)
        if problem is None:
            self._crew.add_missing()
        else:
            self._give_up_start(worker, f"a worker of {self._options.node} {problem}")

    # ---- what runs that recover do otherwise than those that do not

    @abstractmethod
    def _break(self, order: messages.Break) -> None:
        """End the generation, as the coordinator says."""

    @abstractmethod
    def _bury_rank(self, worker: Worker, rank: int) -> None:
        """Deal with a member's process that has ended."""

    @abstractmethod
    def _give_up_start(self, worker: Worker, text: str) -> None:
        """Deal with a process that would not start at another try."""

    @abstractmethod
    def _check_workers(self, now_s: float) -> None:
        """Do what is due about workers that do not get on."""

    @abstractmethod
    def _end_workers(self, end: messages.End) -> float:
        """Have the workers end as the run does; returns how many seconds they have."""
