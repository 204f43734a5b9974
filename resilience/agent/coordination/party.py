"""One agent among the others: follows the coordinator, or is it. A shell over pure decisions.

Whom it follows is decided in `succession`, what a coordinator opens in `coordinator`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from resilience.agent.connections.transport import Gone, Heard, Transport
from resilience.agent.coordination import coordinator, succession
from resilience.agent.coordination.founding import RENEWAL_S
from resilience.agent.coordination.membership import (
    ENDED,
    RUNNING,
    STOPPING,
    Action,
    Claimed,
    ClaimRecord,
    Ended,
    Event,
    FoundRun,
    HandOver,
    Judged,
    NodeEnded,
    NodeJoined,
    Note,
    Recorded,
    Replace,
    Said,
    Send,
    State,
    Tick,
)
from resilience.agent.coordination.outlook import (
    NO_ORDER,
    Act,
    Coordinate,
    Dial,
    Dialed,
    Follow,
    HandedOver,
    HangUp,
    Heeded,
    JoinAgain,
    Lead,
    Looked,
    Moved,
    Obey,
    Outlook,
    Owner,
    Records,
    Resign,
    Settled,
    Tell,
)
from resilience.agent.coordination.votes import find_doubted, find_ended
from resilience.arguments import NAMELESS_S, NO_NAME
from resilience.comm.generation_store import GenerationStore
from resilience.comm.messages import (
    Beat,
    Drain,
    Drained,
    Goodbye,
    Join,
    Learn,
    Message,
    Open,
    Propose,
    ReplaceRank,
    StoreReply,
    StoreRequest,
)
from resilience.runtime.door import AGENTS
from resilience.state.layout import Layout

EVIDENCE_EVERY_S = 0.05
"""An answer wakes the agent. Who then asks again at once keeps a core and the disk busy for as long
as a place is empty, which can be hours."""

_ROSTER_S_PER_NODE = 1e-4
"""While many nodes come, all are told of them together."""
_AFTER_ROSTER = (Propose, Open, Learn)
_HERE = -1
"""Stands for this agent's own workers among connections."""
Doubt = Callable[[Mapping[str, frozenset[str]]], None]
"""Takes the agents that are silent now, with their starts; asks whether they have ended."""


class Party:
    """Runs in the agent's one thread; nothing in it waits."""

    def __init__(
        self,
        owner: Owner,
        outlook: Outlook,
        *,
        transport: Transport,
        records: Records,
        note: Callable[[Note, int], None],
        clock: Callable[[], float],
        doubt: Doubt,
    ) -> None:
        self._owner = owner
        self._outlook = outlook
        self._transport = transport
        self._records = records
        self._note = note
        self._clock = clock
        self._doubt = doubt
        self._state: State | None = None
        """What is coordinated here, where this agent leads."""
        self._store = GenerationStore(generation=-1)
        """The store of the generation which was opened here last."""
        self._inbox: deque[Heeded | Event] = deque()
        self._is_busy = False
        self._told: set[int] = set()
        """Connections over which the end of the run was told."""
        self._apart: set[str] = set()
        """Addresses that were complained of: nobody of this run comes in there."""
        self._nameless: dict[str, float] = {}
        """Since when the name in an address has not resolved."""
        self._is_roster_due = False
        """Whether nodes have come or left since it was told."""
        self._peers: dict[str, int] | None = None
        """Connections of nodes that have joined, for the actions of one decision."""
        self._beat_s = self._renewed_s = self._asked_s = float("-inf")
        self._question: tuple[Ended, Mapping[str, frozenset[str]]] = (frozenset(), {})
        """What was asked last: the record behind these ends, and about silent agents."""
        self._is_closed = False
        self.due_s = float("-inf")
        """When the next tick is due at the latest."""

    @property
    def has_coordinator(self) -> bool:
        """Return whether there is somebody to talk to."""
        return self._state is not None or self._outlook.link is not None

    @property
    def state(self) -> State | None:
        """Return what is coordinated here; None where another agent coordinates."""
        return self._state

    def tell(self, message: Message) -> None:
        """Tell something to the coordinator; who has none is asked again by the next one."""
        if isinstance(message, Join):
            view = self._outlook
            message = replace(
                message,
                promised=view.hello.ballot,
                known=tuple(sorted(view.known)),
                program=view.program,
            )
        if self._state is not None:
            node = self._outlook.hello.node
            if isinstance(message, Join):
                self._take(NodeJoined(join=message))
            else:
                self._take(Said(node=node, message=message))
        elif self._outlook.link is not None:
            self._transport.send(self._outlook.link, message)

    def ask_store(self, request: StoreRequest) -> None:
        """Have the coordinator serve a call of a worker's; without one the call waits in vain.

        Its generation is over then. `reply` of the owner follows.
        """
        if self._state is not None:
            self._serve_store(_HERE, request)
        elif self._outlook.link is not None:
            self._transport.send(self._outlook.link, request)

    def serve(self) -> None:
        """Take in what others have said."""
        for arrival in self._transport.receive():
            self._take(arrival)

    def tick(self) -> None:
        """Do what is due."""
        now_s = self._clock()
        self.due_s = self._transport.tick(now_s)
        self.serve()
        self._take(Looked())
        self._look_for_evidence(now_s)
        if self._state is None:
            return
        roster_s = self._roster_s() if self._is_roster_due else math.inf
        if now_s >= min(roster_s, self._beat_s + self._outlook.beat_every_s):
            self._send_roster(now_s)
        elif self._is_roster_due:
            self.due_s = min(self.due_s, roster_s)
        if now_s >= coordinator.next_deadline_s(self._state, now_s):
            self._take(Tick())

    def _look_for_evidence(self, now_s: float) -> None:
        """Ask about silent agents: of what is new at once, of what stays from time to time."""
        state = self._state
        if state is None or state.stage != STOPPING:
            return
        question = ended, doubted = find_ended(state), find_doubted(state)
        if question != self._question or now_s - self._asked_s >= EVIDENCE_EVERY_S:
            self._question, self._asked_s = question, now_s
            if state.shares_folder:
                self._records.read_record(ended)
            self._doubt(doubted)
        if state.shares_folder or doubted:
            self.due_s = min(self.due_s, self._asked_s + EVIDENCE_EVERY_S)

    def move(self, generation: int, layout: Layout | None) -> None:
        """Note the newest generation that the agent knows of, and its place there."""
        hello = self._outlook.hello
        place = -1 if layout is None else layout.place_of(hello.node, hello.start)
        order = place if place >= 0 else self._endpoint_order()
        self._take(Moved(generation=generation, order=order))

    def answer(self, event: Claimed | Judged | NodeEnded | Recorded) -> None:
        """Take in what the folder of the run says, or whoever was asked about silent agents."""
        if self._state is not None:
            self._take(event)

    def close(self) -> None:
        """Follow nobody any more: the run has ended for this agent.

        One that coordinates tells those who come later, unless the run goes on without it.
        """
        self._is_closed = True
        if self._state is not None and self._state.stage != ENDED:
            self._state = None

    def leave(self, reason: str) -> None:
        """Tell goodbye, once: this node's workers take part in nothing any more."""
        self.close()
        for peer, line in self._outlook.lines.items():
            if peer == self._outlook.link or line.join is not None:
                self._transport.send(peer, Goodbye(reason=reason))
        self._outlook = replace(self._outlook, lines={}, link=None)

    def _endpoint_order(self) -> int:
        hello, endpoints = self._outlook.hello, self._outlook.endpoints
        if hello.address in endpoints:
            return NO_ORDER + endpoints.index(hello.address)
        return NO_ORDER + len(endpoints)

    # ---- decisions

    def _take(self, event: Heeded | Event) -> None:
        """Decide about one event after the other; what is done about one may cause more."""
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

    def _serve_store(self, caller: int, request: StoreRequest) -> None:
        for (peer, _), reply in self._store.serve((caller, request.worker), request):
            if peer == _HERE:
                self._owner.reply(reply)
            else:
                self._transport.send(peer, reply)

    def _is_of_store(self, event: Heeded | Event) -> bool:
        """Pass on calls of the store and replies; returns whether the event was one.

        No rule of membership is about them, and they are many.
        """
        if not isinstance(event, Heard):
            return False
        message, line = event.message, self._outlook.lines.get(event.peer)
        if isinstance(message, StoreRequest):
            if self._state is not None and line is not None and line.join is not None:
                self._serve_store(event.peer, message)
            return True
        if isinstance(message, StoreReply):
            if event.peer == self._outlook.link:
                self._owner.reply(message)
            return True
        return False

    def _decide(self, event: Heeded | Event) -> None:
        if self._is_of_store(event):
            return
        now_s = self._clock()
        if isinstance(event, Event):
            self._coordinate(event, now_s)
            return
        if isinstance(event, Heard) and isinstance(event.message, Drain):
            self._transport.send(event.peer, Drained(problem=self._owner.drain(event.message)))
            return
        if self._is_closed and self._state is None:
            # Until its workers have ended it is no silent node.
            self._beat(now_s)
            return
        if isinstance(event, Gone):
            self._complain(event, now_s)
        self._outlook, acts = succession.decide(self._outlook, event, now_s)
        for act in acts:
            self._act(act)

    def _complain(self, gone: Gone, now_s: float) -> None:
        """Say once of an address that no agent of the run is there, or its name is long unknown."""
        line = self._outlook.lines.get(gone.peer)
        if line is None or line.address is None or line.address in self._apart:
            return
        if gone.reason.startswith(NO_NAME):
            is_apart = now_s - self._nameless.setdefault(line.address, now_s) >= NAMELESS_S
        else:
            self._nameless.pop(line.address, None)
            is_apart = gone.reason in AGENTS.lasting
        if is_apart:
            self._apart.add(line.address)
            note = Note(event="warning", fields={"text": f"{line.address}: {gone.reason}"})
            self._note(note, self._outlook.hello.generation)

    def _beat(self, now_s: float) -> None:
        link = self._outlook.link
        if link is not None and now_s - self._beat_s >= self._outlook.beat_every_s:
            self._beat_s = now_s
            self._transport.send(link, Beat())

    def _act(self, act: Act) -> None:
        if isinstance(act, Tell):
            self._transport.send(act.peer, act.message)
        elif isinstance(act, HangUp):
            self._transport.hang_up(act.peer)
        elif isinstance(act, Dial):
            peer = self._transport.connect(act.address)
            # Before anything that comes over the connection.
            self._inbox.appendleft(Dialed(peer=peer, address=act.address))
        elif isinstance(act, Coordinate):
            self._coordinate(act.event, self._clock())
        elif isinstance(act, Obey):
            self._owner.hear(act.message)
        elif isinstance(act, Lead):
            view = self._outlook
            state = self._owner.make_state(act.lost, view.dead, view.known)
            self._state = replace(state, starts=view.starts, ballot=view.hello.ballot)
            self._beat_s = float("-inf")
            if act.lost:
                fields = {"node": self._outlook.hello.node, "lost": act.lost}
                note = Note(event="coordinator_replaced", fields=fields)
                self._note(note, self._state.generation)
            self._owner.join()
        elif isinstance(act, Resign):
            self._state, self._store = None, GenerationStore(generation=-1)
        elif isinstance(act, Follow):
            self._records.look(act.start)
            self._owner.join()
        elif isinstance(act, JoinAgain):
            self._owner.join()

    def _coordinate(self, event: Event, now_s: float) -> None:
        if self._state is None:
            return
        before = self._state
        self._state, actions = coordinator.decide(before, event, now_s)
        is_open = self._state.stage == RUNNING
        if self._state.opened != before.opened:
            self._store = GenerationStore(generation=self._state.opened)
        self._renew_record(before, now_s)
        if is_open != (before.stage == RUNNING):
            self._inbox.appendleft(Settled(is_open=is_open))
        messages = [each.message for each in actions if isinstance(each, Send)]
        if self._is_roster_due and any(isinstance(each, _AFTER_ROSTER) for each in messages):
            # A coordinator that follows this one has to know all nodes that were there.
            self._send_roster(now_s)
        self._is_roster_due |= before.present.keys() != self._state.present.keys()
        self._peers = None
        for action in actions:
            self._carry_out(action)
        if self._state.ballot != before.ballot:
            hello = replace(self._outlook.hello, ballot=self._state.ballot)
            self._outlook = replace(self._outlook, hello=hello)
            self._send_roster(now_s)
            self._owner.join()
        if self._is_roster_due and now_s >= self._roster_s():
            self._send_roster(now_s)

    def _roster_s(self) -> float:
        """Return when nodes may be told again of each other: so many bytes go to so many."""
        return self._beat_s + _ROSTER_S_PER_NODE * len(self._outlook.lines)

    def _renew_record(self, before: State, now_s: float) -> None:
        """Have the folder know what a newcomer has to, some time after the fact."""
        state = self._state
        assert state is not None
        # Who gives up waiting for others knows nothing of what these do.
        is_over = state.stage == ENDED and before.stage == RUNNING
        has_come = state.starts is not before.starts and state.starts != before.starts
        told, told_before = ((each.opened, each.known, each.gone) for each in (state, before))
        has_changed = has_come or told != told_before
        is_due = has_changed or now_s - self._renewed_s >= RENEWAL_S
        if state.opened >= 0 and before.stage != ENDED and (is_due or is_over):
            self._renewed_s = now_s
            self._records.renew(
                tuple(sorted(state.known)),
                state.generation,
                starts=state.starts,
                here=tuple(state.present),
                gone=state.gone,
                is_over=is_over,
                status=state.ending.status if state.ending else 0,
            )

    def _carry_out(self, action: Action) -> None:
        assert self._state is not None
        if isinstance(action, Note):
            self._note(action, self._state.generation)
        elif isinstance(action, ClaimRecord):
            own = self._state.present.get(self._outlook.hello.node)
            if own is not None and own.shares_folder:
                self._records.claim(action.generation, action.layout)
            else:
                # The record of another folder would be one that each half could have.
                none = Claimed(
                    generation=action.generation, layout=None, reason="others see another"
                )
                self._inbox.append(none)
        elif isinstance(action, FoundRun):
            self._records.found(action.agents)
        elif isinstance(action, HandOver):
            self._inbox.append(HandedOver(address=self._state.present[action.node].address))
        elif isinstance(action, Replace):
            self._send(action.node, ReplaceRank(rank=action.rank, reason=action.reason))
        elif isinstance(action, Send):
            self._send(action.node, action.message)

    def _send(self, node: str, message: Message) -> None:
        if node == self._outlook.hello.node:
            self._owner.hear(message)
            return
        if self._peers is None:
            lines = self._outlook.lines.items()
            self._peers = {line.join.node: peer for peer, line in lines if line.join is not None}
        if node in self._peers:
            self._transport.send(self._peers[node], message)

    def _send_roster(self, now_s: float) -> None:
        """Renew every agent's lease, and tell who would follow as coordinator."""
        if self._state is None:
            return
        self._beat_s, self._is_roster_due = now_s, False
        hello, layout = self._outlook.hello, self._state.layout
        addresses = {join.node: join.address for join in self._state.present.values()}
        addresses[hello.node] = hello.address
        starts = {join.node: join.start for join in self._state.present.values()}
        starts[hello.node] = hello.start
        places = layout.nodes if layout else ()
        order = [*(node for node in places if node in addresses), *sorted(addresses)]
        names = tuple(dict.fromkeys(order))
        beat = Beat(
            nodes=tuple((node, addresses[node]) for node in names),
            starts=tuple(starts[node] for node in names),
            ballot=hello.ballot,
        )
        for peer, line in self._outlook.lines.items():
            if line.address is None:
                self._transport.send(peer, beat)
        view = self._outlook
        self._outlook = replace(
            view,
            roster=beat.nodes,
            known=view.known | addresses.keys() | self._state.known,
            starts={**view.starts, **starts},
        )

    def _tell_end(self) -> None:
        """Tell the end of the run also to agents that have not joined, or come later."""
        if self._state is None or self._state.stage != ENDED or self._state.ending is None:
            return
        for peer, line in self._outlook.lines.items():
            is_told = line.join is not None and line.join.node in self._state.present
            if line.address is None and not is_told and peer not in self._told:
                self._told.add(peer)
                self._transport.send(peer, self._state.ending)
        if self._outlook.hello.node not in self._state.present and -1 not in self._told:
            self._told.add(-1)
            self._owner.hear(self._state.ending)
