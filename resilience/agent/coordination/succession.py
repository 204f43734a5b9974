"""An agent's way to the coordinator, wherever it is, and its successor when it is lost.

The coordinator tells every agent in which order they would follow it. When its
connection closes, or it is silent for too long, each agent turns to the next in
that order; who finds itself there coordinates from then on.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import Protocol

from resilience.agent.coordination.agent_connection import AgentConnection, connect
from resilience.agent.coordination.leader import BEAT_S, LEASE_S, Leader
from resilience.agent.coordination.membership import State
from resilience.agent.coordination.rendezvous import name_leader
from resilience.comm.messages import Beat, Message
from resilience.events import EventLog

_SILENCE_S = 0.7 * LEASE_S
"""An agent gives its coordinator up before its own lease ends there."""
_AWAY_S = 0.5 * _SILENCE_S
"""An agent that has done nothing for so long cannot say that others were silent."""


class Owner(Protocol):
    """The agent whose way it is."""

    def hear(self, message: Message) -> None:
        """Take in what the coordinator says."""
        ...

    def join(self) -> None:
        """Tell a new coordinator of this node."""
        ...

    def lose_all(self) -> None:
        """There is no coordinator any more, and nobody to follow it."""
        ...

    def make_state(self, lost: str | None, silent: frozenset[str]) -> State:
        """Return what a coordinator here would begin with, as the successor of `lost`.

        `silent` are the agents that may still live.
        """
        ...


class Succession:
    """Knows who coordinates. Runs in the agent's one thread."""

    def __init__(
        self,
        owner: Owner,
        *,
        node: str,
        host: str,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        events: EventLog,
        note: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._owner = owner
        self._node = node
        self._host = host
        self._listener = listener
        self._selector = selector
        self._events = events
        self._note = note
        self._link: AgentConnection | None = None
        """The connection to the coordinator, where it is in another process."""
        self._strays: dict[AgentConnection, list[Message]] = {}
        """Agents that came to us before we know that we are the coordinator."""
        self._roster: tuple[tuple[str, str], ...] = ()
        self._silent: set[str] = set()
        """Agents that did not answer and may still live, over all coordinators since then."""
        self._heard_s = self._beat_s = self._tick_s = time.monotonic()
        self._is_closed = False
        self.leader: Leader | None = None
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> str:
        """Return where other agents reach this one."""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def begin(self, leader_address: str) -> None:
        """Find the first coordinator; raises ConnectionError where there is none."""
        if leader_address == self.address:
            self._lead(None, frozenset())
            return
        try:
            self._follow(leader_address)
        except OSError as error:
            raise ConnectionError(
                f"no coordinator at {leader_address}: {error}; it ended, or a firewall is between"
            ) from error

    def tell(self, message: Message) -> None:
        """Say something to the coordinator."""
        if self.leader:
            self.leader.hear(message, None)
        elif self._link:
            self._link.send(message)

    def take_roster(self, beat: Beat) -> None:
        """Note who would follow, as a coordinator says that leads us."""
        self._roster = beat.nodes
        self._silent.clear()

    def tick(self, now_s: float) -> None:
        """Renew leases, and give up a coordinator that is silent."""
        if now_s - self._tick_s > _AWAY_S:
            # It was this process that was stopped: what the coordinator has said is still unread.
            self._heard_s = now_s
        self._tick_s = now_s
        if self.leader:
            self.leader.tick()
        elif self._link and now_s - self._heard_s > _SILENCE_S:
            self._lose(is_dead=False)
        elif self._link and now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._link.send(Beat())

    def close(self) -> None:
        """Follow nobody any more: the run has ended for this agent."""
        self._is_closed = True

    def _lead(self, lost: str | None, silent: frozenset[str]) -> None:
        self.leader = Leader(
            self._owner.make_state(lost, silent),
            node=self._node,
            address=self.address,
            tell_self=self._owner.hear,
            events=self._events,
        )
        strays, self._strays = self._strays, {}
        for peer, messages in strays.items():
            for message in messages:
                self.leader.hear(message, peer)

    def _follow(self, address: str) -> None:
        link = connect(address)
        self._link = link
        self._heard_s = self._beat_s = time.monotonic()
        link.send(Beat())
        self._selector.register(link, selectors.EVENT_READ, self._read_link)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # who had called has hung up again
            return
        peer = AgentConnection(connection)
        peer.heard_s = time.monotonic()
        self._strays[peer] = []
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._read_peer(peer))

    def _read_peer(self, peer: AgentConnection) -> None:
        messages = peer.read()
        if messages is None:
            self._selector.unregister(peer)
            peer.close()
            self._strays.pop(peer, None)
            if self.leader:
                self.leader.lose(peer)
            return
        for message in messages:
            if self.leader:
                self.leader.hear(message, peer)
            elif not isinstance(message, Beat) or not self._strays[peer]:
                self._strays[peer].append(message)

    def _read_link(self) -> None:
        assert self._link
        messages = self._link.read()
        if messages is None:
            self._lose(is_dead=True)
            return
        self._heard_s = time.monotonic()
        for message in messages:
            self._owner.hear(message)

    def _returns_to(self, address: str) -> bool:
        """Join a coordinator again that has closed the connection and lives: it gave us up."""
        try:
            self._follow(address)
        except (OSError, ValueError):
            return False
        self._owner.join()
        return True

    def _lose(self, *, is_dead: bool) -> None:
        """Follow the next agent in the order of succession, or lead."""
        assert self._link
        self._selector.unregister(self._link)
        self._link.close()
        self._link = None
        if self._is_closed:
            return
        lost, *rest = self._roster or (("", ""),)
        if is_dead and self._returns_to(lost[1]):
            return
        self._silent -= {self._node, *({lost[0]} if is_dead else ())}
        silent = self._silent if is_dead else self._silent | {lost[0]}
        self._silent = silent
        for place, (node, address) in enumerate(rest):
            if node == self._node:
                silent |= {other for other, _ in rest[place + 1 :]}
                self._roster = ()
                name_leader(self.address)
                self._note("coordinator_replaced", {"node": node, "lost": lost[0]})
                self._lead(lost[0], frozenset(silent))
                self._owner.join()
                return
            try:
                self._follow(address)
            except ConnectionRefusedError:
                # Its machine says that there is no such process.
                continue
            except OSError:
                silent.add(node)
                continue
            self._roster = tuple(rest[place:])
            self._owner.join()
            return
        self._owner.lose_all()
