"""The coordinator's shell: connections to agents, the stores of generations, the clock.

It lives in one agent's process. What it does is decided in `coordinator`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from resilience.agent.coordination.agent_connection import AgentConnection
from resilience.agent.coordination.coordinator import decide, next_deadline_s
from resilience.agent.coordination.membership import (
    Action,
    Event,
    NodeJoined,
    NodeLost,
    Note,
    Replace,
    Said,
    Send,
    State,
    Tick,
)
from resilience.comm.messages import Beat, End, Join, Message, Open, ReplaceRank
from resilience.events import EventLog

LEASE_S = 10.0
"""An agent that was not heard for this long counts as lost."""
BEAT_S = 1.0
TAKEN_NAME_STATUS = 2
"""Exit status of an agent whose name another one has."""
_FIRST_STORE_TIMEOUT = timedelta(seconds=60)
_STORE_TIMEOUT = timedelta(seconds=5)
"""While a store is made nobody's lease is renewed."""
_STORE_RETRY_S = 10.0


class StoreError(RuntimeError):
    """The workers' store cannot be opened at all; the message says why."""


class Leader:
    """Runs the coordinator over the agents that have joined."""

    def __init__(
        self,
        state: State,
        *,
        node: str,
        address: str,
        tell_self: Callable[[Message], None],
        events: EventLog,
    ) -> None:
        self._state = state
        self._node = node
        self._address = address
        self._host = address.rpartition(":")[0]
        self._tell_self = tell_self
        self._events = events
        self._peers: dict[str, AgentConnection] = {}
        self._connections: set[AgentConnection] = set()
        """Of all agents, also of those whose workers are not warm yet."""
        self._stores: deque[TCPStore] = deque(maxlen=2)
        self._next_store: TCPStore | None = self._open_store(_FIRST_STORE_TIMEOUT)
        self._retry_s = 0.0
        self._beat_s = 0.0
        self._inbox: deque[Event] = deque()
        self._told: set[AgentConnection] = set()
        """Connections whose agents know that the run has ended."""
        self._is_deciding = False

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended."""
        return self._state.stage == "ended"

    def hear(self, message: Message, peer: AgentConnection | None) -> None:
        """Take in what an agent says; `peer` is None for the agent of this process."""
        node = self._node
        if peer is not None:
            peer.heard_s = time.monotonic()
            self._connections.add(peer)
            if isinstance(message, Join):
                if self._is_taken(message.node, peer):
                    reason = f"another agent is named {message.node!r}; set --node-name"
                    peer.send(End(status=TAKEN_NAME_STATUS, reason=reason))
                    return
                peer.node = message.node
                self._peers[message.node] = peer
            if peer.node is None:
                self._tell_rest()
                return
            node = peer.node
        if isinstance(message, Beat):
            self._tell_rest()
            return
        try:
            if isinstance(message, Join):
                self._take(NodeJoined(join=message))
                self._send_roster()
            else:
                self._take(Said(node=node, message=message))
        except (KeyError, IndexError, TypeError, ValueError):
            if peer is None:
                raise
            # No agent of this version says so; the run does not end for it.
            peer.hang_up()

    def _is_taken(self, name: str, peer: AgentConnection) -> bool:
        return name == self._node or self._peers.get(name, peer) is not peer

    def lose(self, peer: AgentConnection, *, is_dead: bool = True) -> None:
        """Note that an agent's connection is closed."""
        self._connections.discard(peer)
        if peer.node is not None and self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
            self._take(NodeLost(node=peer.node, is_dead=is_dead))
            self._send_roster()

    def tick(self) -> None:
        """Do what is due: leases, heartbeats, deadlines."""
        now_s = time.monotonic()
        for peer in list(self._connections):
            if now_s - peer.heard_s > LEASE_S:
                self.lose(peer, is_dead=False)
                peer.hang_up()
        if now_s - self._beat_s >= BEAT_S:
            self._send_roster()
        if now_s >= next_deadline_s(self._state):
            self._take(Tick())

    def _send_roster(self) -> None:
        """Renew every agent's lease, and tell who would follow as coordinator."""
        self._beat_s = time.monotonic()
        others = [join for join in self._state.present.values() if join.node != self._node]
        nodes = ((self._node, self._address), *((join.node, join.address) for join in others))
        beat = Beat(nodes=nodes)
        for peer in list(self._connections):
            peer.send(beat)
        self._tell_self(beat)

    def _take(self, event: Event) -> None:
        """Decide about one event after the other; what we say to ourselves may cause more."""
        self._inbox.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                self._state, actions = decide(self._state, event, time.monotonic())
                for action in actions:
                    self._act(action)
        finally:
            self._is_deciding = False
        self._tell_rest()
        # After the workers are told: to make a store takes a moment.
        if self._next_store is None and not self.is_over:
            self._prepare_store()

    def _tell_rest(self) -> None:
        """Tell the end also to agents that have not joined, or come later."""
        if self._state.ending is None:
            return
        for peer in self._connections - self._told:
            if peer.node not in self._state.present:
                peer.send(self._state.ending)
        self._told |= self._connections
        if self._node not in self._state.present:
            self._tell_self(self._state.ending)

    def _act(self, action: Action) -> None:
        if isinstance(action, Note):
            self._note(action)
            return
        if isinstance(action, Replace):
            message: Message = ReplaceRank(rank=action.rank, reason=action.reason)
        else:
            assert isinstance(action, Send)
            message = action.message
            if isinstance(message, Open):
                message = replace(message, store=self._store_of(message.generation))
        if action.node == self._node:
            self._tell_self(message)
        elif peer := self._peers.get(action.node):
            peer.send(message)

    def _note(self, note: Note) -> None:
        self._events.enter(self._state.generation)
        self._events.write(note.event, rank=note.rank, **note.fields)

    def _prepare_store(self) -> None:
        """Make the next store; where that fails the last one serves the next generation too."""
        now_s = time.monotonic()
        if now_s < self._retry_s:
            return
        try:
            self._next_store = self._open_store(_STORE_TIMEOUT)
        except StoreError as error:
            self._retry_s = now_s + _STORE_RETRY_S
            self._note(Note(event="warning", fields={"text": str(error)}))

    def _open_store(self, timeout: timedelta) -> TCPStore:
        try:
            return TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        except DistError as error:
            problem = str(error).strip().partition("\n")[0]
            raise StoreError(
                f"cannot open a store on {self._host!r}: {problem}; set --local-addr to an "
                "address of this node"
            ) from error

    def _store_of(self, generation: int) -> str:
        """Return the address of a generation's own store.

        Each has its own where one could be made, and its own prefix in any case;
        the two newest are kept.
        """
        if self._next_store is not None:
            self._stores.append(self._next_store)
            self._next_store = None
        return f"{self._host}:{self._stores[-1].port}"
