"""One agent among the others: follows the coordinator, or is it. A shell over pure decisions.

`succession` decides whom it follows. `coordinator` decides what a coordinator opens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from resilience.agent.connections.complaints import OTHER_RUN, Complaints
from resilience.agent.connections.transport import Gone, Heard, Transport
from resilience.agent.coordination import coordinator, events, succession
from resilience.agent.coordination import view as views
from resilience.agent.coordination.founding import RENEWAL_S
from resilience.agent.coordination.membership import Stage, State
from resilience.agent.coordination.view import MembershipView, Owner, Records
from resilience.agent.coordination.votes import find_doubted, find_ended
from resilience.comm import messages
from resilience.comm.generation_store import GenerationStore
from resilience.state.layout import Layout

EVIDENCE_EVERY_S = 0.05
"""An answer wakes the agent. An agent that asks again at once keeps a core and the disk busy for as
long as a place is empty, which can be hours."""

_ROSTER_S_PER_NODE = 1e-4
"""While many nodes join, one roster tells all of them together."""
_AFTER_ROSTER = (messages.Propose, messages.Open, messages.Learn)
_HERE = -1
"""Stands for this agent's own workers among connections."""
Doubt = Callable[[Mapping[str, frozenset[str]]], None]
"""Takes the agents that are silent now, with their starts; asks whether they have ended."""


class MembershipNode:
    """Runs in the agent's one thread; nothing in it waits."""

    def __init__(
        self,
        owner: Owner,
        view: MembershipView,
        *,
        transport: Transport,
        records: Records,
        note: Callable[[events.Note, int], None],
        clock: Callable[[], float],
        doubt: Doubt,
    ) -> None:
        self._owner, self._view, self._transport = owner, view, transport
        self._records, self._note, self._clock = records, note, clock
        self._evidence = _Evidence(records, doubt)
        self._state: State | None = None
        """State of the coordinator here, where this agent leads."""
        self._store = _Store(owner, transport)
        self._inbox: deque[events.Heeded | events.Event] = deque()
        self._is_busy = self._is_closed = False
        self._told: set[int] = set()
        """Connections over which the end of the run was told."""
        self._complaints = Complaints(view.lease_s)
        self._is_roster_due = False
        """Whether nodes have come or left since the last roster."""
        self._peers: dict[str, int] | None = None
        """Connections of nodes that have joined, for the actions of one decision."""
        self._beat_s = float("-inf")
        self.due_s = float("-inf")
        """When the next tick is due at the latest."""

    @property
    def has_coordinator(self) -> bool:
        """Return whether this agent has a coordinator, or is the coordinator."""
        return self._state is not None or self._view.link is not None

    @property
    def state(self) -> State | None:
        """Return the state of the coordinator here; None where another agent coordinates."""
        return self._state

    def sees(self, nodes: Collection[str]) -> bool:
        """Return whether the coordinator's last roster has all these nodes."""
        return {name for name, _ in self._view.roster}.issuperset(nodes)

    @property
    def complaints(self) -> Mapping[str, str]:
        """Return why there is no agent of this run at an address, by address."""
        return self._complaints.named

    def tell(self, message: messages.Message) -> None:
        """Tell something to the coordinator; without one, the next coordinator asks again."""
        view = self._view
        if isinstance(message, messages.Join):
            known = tuple(sorted(view.known))
            message = replace(
                message, promised=view.hello.ballot, known=known, program=view.program
            )
        if self._state is None:
            self._send_to_coordinator(message)
        elif isinstance(message, messages.Join):
            self._take(events.NodeJoined(join=message))
        else:
            self._take(events.Said(node=view.hello.node, message=message))

    def ask_store(self, request: messages.StoreRequest) -> None:
        """Have the coordinator serve a worker's call; without one the generation is over anyway."""
        if self._state is None:
            self._send_to_coordinator(request)
        else:
            self._store.serve(_HERE, request)

    def _send_to_coordinator(self, message: messages.Message) -> None:
        if self._view.link is not None:
            self._transport.send(self._view.link, message)

    def serve(self) -> None:
        """Take in the messages of the others."""
        for arrival in self._transport.receive():
            self._take(arrival)

    def tick(self) -> None:
        """Do what is due."""
        now_s = self._clock()
        self.due_s = self._transport.tick(now_s)
        self.serve()
        self._take(events.Looked())
        if self._state is None:
            return
        self.due_s = min(self.due_s, self._evidence.look(self._state, now_s))
        if note := self._evidence.find_late_reason(self._state, now_s):
            self._note(note, self._state.generation)
        roster_s = self._roster_s() if self._is_roster_due else math.inf
        if now_s >= min(roster_s, self._beat_s + self._view.beat_every_s):
            self._send_roster(now_s)
        elif self._is_roster_due:
            self.due_s = min(self.due_s, roster_s)
        if now_s >= coordinator.next_deadline_s(self._state, now_s):
            self._take(events.Tick())

    def move(self, generation: int, layout: Layout | None) -> None:
        """Note the newest generation that the agent knows of, and its place there."""
        hello = self._view.hello
        order = -1 if layout is None else layout.place_of(hello.node, hello.start)
        if order < 0:
            order = views.find_endpoint_order(hello.address, self._view.endpoints)
        self._take(events.Moved(generation=generation, order=order))

    def answer(
        self, event: events.Claimed | events.Judged | events.NodeEnded | events.Recorded
    ) -> None:
        """Take in an answer of the run's folder, or evidence about a silent agent."""
        if self._state is not None:
            self._take(event)

    def close(self) -> None:
        """Follow no coordinator; a coordinator that has ended the run still tells late agents."""
        self._is_closed = True
        if self._state is not None and self._state.stage != Stage.ENDED:
            self._state = None

    def leave(self, reason: str) -> None:
        """Say goodbye, once: this node's workers take part in nothing any more."""
        self.close()
        for peer, line in self._view.lines.items():
            if peer == self._view.link or line.join is not None:
                self._transport.send(peer, messages.Goodbye(reason=reason))
        self._view = replace(self._view, lines={}, link=None)

    # ---- decisions

    def _take(self, event: events.Heeded | events.Event) -> None:
        """Decide about one event after the other; the acts of one may cause more."""
        self._inbox.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._inbox:
                self._decide(self._inbox.popleft())
        finally:
            self._is_busy = False
        self._tell_end()

    def _answer_aside(self, heard: Heard) -> bool:
        """Answer messages that no rule of membership is about; returns whether this is one."""
        message, line = heard.message, self._view.lines.get(heard.peer)
        if isinstance(message, messages.StoreRequest):
            if self._state is not None and line is not None and line.join is not None:
                self._store.serve(heard.peer, message)
        elif isinstance(message, messages.StoreReply):
            if heard.peer == self._view.link:
                self._owner.reply(message)
        elif isinstance(message, messages.Drain):
            answer = messages.Drained(problem=self._owner.drain(message))
            self._transport.send(heard.peer, answer)
        else:
            return False
        return True

    def _decide(self, event: events.Heeded | events.Event) -> None:
        now_s, view = self._clock(), self._view
        if isinstance(event, events.Event):
            self._coordinate(event, now_s)
        elif isinstance(event, Heard) and self._answer_aside(event):
            return
        elif self._is_closed and self._state is None:
            if view.link is not None and now_s - self._beat_s >= view.beat_every_s:
                # Until its workers have ended it is no silent node.
                self._beat_s = now_s
                self._transport.send(view.link, messages.Beat())
        else:
            if isinstance(event, Gone | Heard) and (line := view.lines.get(event.peer)):
                reason = _find_complaint(event, view.hello.run)
                self._warn(self._complaints.judge(line.address, reason, now_s))
            self._view, acts = succession.decide(view, event, now_s)
            for act in acts:
                self._act(act)

    def _warn(self, text: str) -> None:
        if text:
            self._note(events.warn(text), self._view.hello.generation)

    def _act(self, act: events.Act) -> None:
        match act:
            case events.Tell():
                self._transport.send(act.peer, act.message)
            case events.HangUp():
                self._transport.hang_up(act.peer)
            case events.Dial():
                peer = self._transport.connect(act.address)
                # Before anything that comes over the connection.
                self._inbox.appendleft(events.Dialed(peer=peer, address=act.address))
            case events.Note():
                self._note(act, self._view.hello.generation)
            case messages.Message():
                self._owner.obey(act)
            case events.Lead():
                self._lead(act.lost)
                self._owner.join()
            case events.Resign():
                self._state = None
                self._store.begin(-1)
            case events.Follow():
                self._records.look(act.start)
                self._owner.join()
            case events.JoinAgain():
                self._owner.join()
            case _:
                self._coordinate(act, self._clock())

    def _lead(self, lost: str) -> None:
        view = self._view
        state = self._owner.make_state(lost, view.dead, view.known)
        self._state = replace(state, starts=view.starts, ballot=view.hello.ballot)
        self._beat_s = float("-inf")
        if lost:
            fields = {"node": view.hello.node, "lost": lost}
            note = events.Note(event="coordinator_replaced", fields=fields)
            self._note(note, self._state.generation)

    def _coordinate(self, event: events.Event, now_s: float) -> None:
        if self._state is None:
            return
        before = self._state
        self._state, todo = coordinator.decide(before, event, now_s)
        is_open = self._state.stage == Stage.RUNNING
        if self._state.opened != before.opened:
            self._store.begin(self._state.opened)
        self._evidence.renew(before, self._state, now_s)
        if is_open != (before.stage == Stage.RUNNING):
            self._inbox.appendleft(events.Settled(is_open=is_open))
        said = [each.message for each in todo if isinstance(each, events.Send)]
        if self._is_roster_due and any(isinstance(each, _AFTER_ROSTER) for each in said):
            # A coordinator that follows this one has to know all nodes that were there.
            self._send_roster(now_s)
        self._is_roster_due |= before.present.keys() != self._state.present.keys()
        self._peers = None
        for action in todo:
            self._carry_out(action, self._state)
        if self._state.ballot != before.ballot:
            hello = replace(self._view.hello, ballot=self._state.ballot)
            self._view = replace(self._view, hello=hello)
            self._send_roster(now_s)
            self._owner.join()
        if self._is_roster_due and now_s >= self._roster_s():
            self._send_roster(now_s)

    def _roster_s(self) -> float:
        """Return when the next roster may be sent: so many bytes go to so many nodes."""
        return self._beat_s + _ROSTER_S_PER_NODE * len(self._view.lines)

    def _carry_out(self, action: events.Action, state: State) -> None:
        match action:
            case events.Note():
                self._note(action, state.generation)
            case events.ClaimRecord(generation=generation, layout=layout):
                own = state.present.get(self._view.hello.node)
                if own is not None and own.shares_folder:
                    self._records.claim(generation, layout)
                else:
                    # The record of another folder would be one that each half could have.
                    reason = "others see another"
                    none = events.Claimed(generation=generation, layout=None, reason=reason)
                    self._inbox.append(none)
            case events.FoundRun():
                self._records.found(action.agents)
            case events.HandOver():
                address = state.present[action.node].address
                self._inbox.append(events.HandedOver(address=address))
            case events.Send():
                self._send(action.node, action.message)

    def _send(self, node: str, message: messages.Message) -> None:
        if node == self._view.hello.node:
            self._owner.obey(message)
            return
        if self._peers is None:
            lines = self._view.lines.items()
            self._peers = {line.join.node: peer for peer, line in lines if line.join is not None}
        if node in self._peers:
            self._transport.send(self._peers[node], message)

    def _send_roster(self, now_s: float) -> None:
        """Renew every agent's lease, and tell the order of succession."""
        if self._state is None:
            return
        self._beat_s, self._is_roster_due = now_s, False
        roster = views.make_roster(self._view, self._state)
        for peer, line in self._view.lines.items():
            if line.address is None:
                self._transport.send(peer, roster)
        self._view = self._view.with_roster(roster, self._state.known)

    def _tell_end(self) -> None:
        """Tell the end of the run also to agents that have not joined, or come later."""
        state = self._state
        if state is None or state.stage != Stage.ENDED or state.ending is None:
            return
        for peer, line in self._view.lines.items():
            is_told = line.join is not None and line.join.node in state.present
            if line.address is None and not is_told and peer not in self._told:
                self._told.add(peer)
                self._transport.send(peer, state.ending)
        if self._view.hello.node not in state.present and _HERE not in self._told:
            self._told.add(_HERE)
            self._owner.obey(state.ending)


def _find_complaint(event: Gone | Heard, run: str) -> str:
    """Return why a connection has ended, or is of no use to an agent of this run."""
    if isinstance(event, Gone):
        return event.reason
    # Another start of the same run may be about to end there.
    name = event.message.run if isinstance(event.message, messages.Hello) else run
    return OTHER_RUN if name.rpartition("-")[0] != run.rpartition("-")[0] else ""


class _Store:
    """Calls of workers to the store of the generation that was opened here last."""

    def __init__(self, owner: Owner, transport: Transport) -> None:
        self._owner, self._transport = owner, transport
        self.begin(-1)

    def begin(self, generation: int) -> None:
        """Serve the calls of this generation, and of no other."""
        self._store = GenerationStore(generation=generation)

    def serve(self, caller: int, request: messages.StoreRequest) -> None:
        """Carry out a call of a connection's worker, and send the replies that it brings about."""
        for (peer, _), reply in self._store.serve((caller, request.worker), request):
            if peer == _HERE:
                self._owner.reply(reply)
            else:
                self._transport.send(peer, reply)


class _Evidence:
    """Questions of a coordinator to the run's record and about silent agents; its own record."""

    def __init__(self, records: Records, doubt: Doubt) -> None:
        self._records, self._doubt = records, doubt
        self._renewed_s = self._asked_s = float("-inf")
        self._reason, self._late_s = "", math.inf
        self._question: tuple[events.Ended, Mapping[str, frozenset[str]]] = (frozenset(), {})
        """The last question: the record behind these ends, and about silent agents."""

    def look(self, state: State, now_s: float) -> float:
        """Ask at once about a new silent agent, from time to time about all; returns when next."""
        if state.stage != Stage.STOPPING:
            return math.inf
        question = ended, doubted = find_ended(state), find_doubted(state)
        if question != self._question or now_s - self._asked_s >= EVIDENCE_EVERY_S:
            self._question, self._asked_s = question, now_s
            if state.shares_folder:
                self._records.read_record(ended)
            self._doubt(doubted)
        has_asked = state.shares_folder or bool(doubted)
        return self._asked_s + EVIDENCE_EVERY_S if has_asked else math.inf

    def find_late_reason(self, state: State, now_s: float) -> events.Note | None:
        """Return why the next generation does not open, once that has been so for a lease."""
        if state.reason != self._reason:
            self._reason, self._late_s = state.reason, now_s + state.options.lease_s
        if now_s < self._late_s or state.stage in (Stage.RUNNING, Stage.ENDED):
            return None
        self._late_s = math.inf
        return events.Note(event="generation_waits", fields={"reason": state.reason})

    def renew(self, before: State, state: State, now_s: float) -> None:
        """Have the folder know what a newcomer has to, some time after the fact."""
        # An agent that gives up waiting for others knows nothing of their run.
        # Of one that was stopped, too, unless others may go on that are not here.
        heard = {*state.reports, *state.finished}
        is_asked = bool(state.finished) and len(heard) == state.members.world_size
        is_over = state.stage == Stage.ENDED and (before.stage == Stage.RUNNING or is_asked)
        has_come = state.starts is not before.starts and state.starts != before.starts
        told, told_before = ((each.opened, each.known, each.gone) for each in (state, before))
        is_due = has_come or told != told_before or now_s - self._renewed_s >= RENEWAL_S
        if state.opened >= 0 and before.stage != Stage.ENDED and (is_due or is_over):
            self._renewed_s = now_s
            self._records.renew(state, is_over=is_over)
