"""The way of a connection into a run's process: one accept loop, the door and TLS.

A connection that has not passed has PROOF_S seconds, and until its door is passed a place among
few, counted by origin. Only the door's bytes are read from it before. No method but `go_through`
waits: one thread serves all connections of a process beside its other work.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from resilience.runtime.door import (
    NAME_BYTES,
    NONCE_BYTES,
    PLACES_MAX,
    PROOF_S,
    Door,
    DoorKind,
    Strangers,
)
from resilience.runtime.tls import NOT_YET, Tls, shake_hands

BACKLOG = 1024
_ACCEPTS_MAX = 256
"""So many connections are accepted at one look, before those that have passed are read again. A
process that seldom looks, on a busy machine, still empties its port under a flood."""
_CALM_MAX = 8
"""Beyond so many connections that have not passed, the port is looked at from time to time only."""
_REST_S = 0.05
"""At most so many seconds are between two such looks."""
_TOGETHER = 16
"""Connections that come between two such looks: a flood does not wake the process for each of them,
and leaves each the time to prove itself before newer ones have its place."""
_DEAF_S = 1.0
"""Seconds without accepting where the process has no descriptor left."""
_LINGER_S = 2.0
_LINGERING_MAX = 256
_DROPPED_BYTES = 1 << 16
_STILL_S = 0.5
"""A tick that comes so late shows that this process stood still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Proof of membership that one process brings to each of its connections."""

    kind: DoorKind
    token: str
    """An empty token lets each process in that reaches the port."""
    tls: Tls | None = None
    name: bytes = field(default_factory=lambda: secrets.token_bytes(NAME_BYTES))

    def lead(self, connection: socket.socket, *, connects: bool) -> Passage:
        """Return the passage of a new connection, which it takes over."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        kind = self.kind.over_tls() if self.tls else self.kind
        door = Door(kind, self.token, name=self.name, nonce=nonce, connects=connects)
        return Passage(connection, door, self.tls)

    def accept(self, connection: socket.socket) -> Passage:
        """Return the passage of a connection that was accepted; see `lead`."""
        return self.lead(connection, connects=False)


class Way:
    """The steps of a connection before it is served; this one drops each connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)  # noqa: FBT003
        self.socket = connection
        self.is_stranger = True
        """Whether it needs one of the places that are few."""

    def advance(self) -> bool:
        """Go on as far as bytes have come, and return whether the connection has passed.

        Raises ValueError or OSError where it cannot pass. The caller closes `socket`.
        """
        if not self.socket.recv(_DROPPED_BYTES):
            raise ConnectionError("it has ended the connection")
        return False


class Passage(Way):
    """One connection's way through the door, and then TLS, if there is TLS.

    `socket` is TLS's from the handshake on.
    """

    def __init__(self, connection: socket.socket, door: Door, tls: Tls | None = None) -> None:
        super().__init__(connection)
        self._door = door
        self._tls = tls
        self._unsaid = bytearray(door.opening)

    def advance(self) -> bool:
        """See `Way`; raises DoorError or OSError."""
        try:
            self._speak()
            self.is_stranger = False
            if self._tls:
                if not isinstance(self.socket, ssl.SSLSocket):
                    door = self._door
                    self.socket = self._tls.wrap(
                        self.socket, word=door.word, connects=door.connects
                    )
                shake_hands(self.socket, self._door.kind)
                self._tls = None
        except NOT_YET:
            return False
        except ValueError as error:
            if answer := getattr(error, "answer", b""):
                with suppress(OSError):
                    self.socket.send(answer)
            raise
        return True

    def go_through(self, timeout_s: float) -> socket.socket:
        """Wait until the connection has passed, and return it; raises as `advance` does."""
        end_s = time.monotonic() + timeout_s
        while not self.advance():
            poll = select.poll()
            poll.register(self.socket, select.POLLIN)
            if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise TimeoutError("the other side does not answer")
        return self.socket

    def _speak(self) -> None:
        door = self._door
        while self._unsaid or not door.is_passed:
            if self._unsaid:
                # A new connection takes these few bytes at once.
                del self._unsaid[: self.socket.send(self._unsaid)]
                continue
            data = self.socket.recv(door.num_wanted)
            if not data:
                raise ConnectionError("it has ended the connection")
            self._unsaid += door.feed(data)


@dataclass(slots=True)
class _Waiting:
    """A connection that has not passed."""

    way: Way
    until_s: float
    """The connection is closed at this time."""


class Server:
    """Accepts the connections at a port. One thread.

    `lead` returns the way of an accepted connection; without it, each has passed. `complain` is
    called with the problem where none can be accepted.
    """

    def __init__(
        self,
        listening: socket.socket,
        lead: Callable[[socket.socket], Way] | None,
        *,
        complain: Callable[[OSError], object] = lambda error: None,
    ) -> None:
        listening.setblocking(False)  # noqa: FBT003
        self.listening = listening
        self._lead = lead
        self._complain = complain
        # The other descriptors are for connections that have passed, and for files.
        self._places = Strangers(min(PLACES_MAX, os.sysconf("SC_OPEN_MAX") // 4))
        self._waiting: dict[int, _Waiting] = {}
        """By descriptor, the oldest first."""
        self._due_s = self._deaf_until_s = self._rests_until_s = math.inf
        self._looked_s, self._num_new = time.monotonic(), 0
        """When `take` has looked last, and how many connections it has accepted."""
        self._epoll = select.epoll()
        self._epoll.register(listening, select.EPOLLIN)
        self._outer = select.epoll()
        """Readable as the other one is, but for rests."""
        self._outer.register(self._epoll, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable while `take` has something to do."""
        return self._outer.fileno()

    def take(self) -> list[socket.socket]:
        """Lead all connections on, and return those that have passed; none of them blocks."""
        passed, self._num_new = [], 0
        port = self.listening.fileno()
        # Newcomers, which may have the others' places, come last.
        for number, _ in sorted(self._epoll.poll(0), key=lambda ready: ready[0] == port):
            if number == port:
                passed += self._accept()
            elif number in self._waiting:
                passed += self._advance(number)
        since_s, self._looked_s = self._looked_s, time.monotonic()
        if len(self._places) > _CALM_MAX:
            rest_s = _TOGETHER * (self._looked_s - since_s) / max(1, self._num_new)
            self._rests_until_s = self._looked_s + min(_REST_S, rest_s)
            self._outer.modify(self._epoll, 0)
        return passed

    def tick(self, now_s: float) -> float:
        """Close what is overdue; returns the time of the next deadline, inf where there is none."""
        is_late = now_s - self._due_s > _STILL_S
        for number, each in list(self._waiting.items()):
            if is_late:
                # This process stood still: the other end's answer may be on its way.
                each.until_s = max(each.until_s, now_s + PROOF_S)
            if each.until_s <= now_s:
                self._forget(number).close()
        if self._deaf_until_s <= now_s:
            self._deaf_until_s = math.inf
            self._epoll.modify(self.listening, select.EPOLLIN)
        if self._rests_until_s <= now_s:
            self._rests_until_s = math.inf
            self._outer.modify(self._epoll, select.EPOLLIN)
        until_s = (each.until_s for each in self._waiting.values())
        self._due_s = min(until_s, default=math.inf)
        return min(self._due_s, self._deaf_until_s, self._rests_until_s)

    def linger(self, connection: socket.socket) -> None:
        """Close a refused connection in a moment: the refusal is read by then.

        To close it over bytes on their way would throw the refusal away.
        """
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            connection.close()
            return
        self._watch(Way(connection), _LINGER_S)
        lingering = [each for each, of in self._waiting.items() if type(of.way) is Way]
        if len(lingering) > _LINGERING_MAX:
            self._forget(lingering[0]).close()

    def close(self) -> None:
        """Close the port and all connections that have not passed."""
        for each in self._waiting.values():
            each.way.socket.close()
        self.listening.close()
        self._outer.close()
        self._epoll.close()

    def _accept(self) -> list[socket.socket]:
        """Accept what waits, and return the connections that have passed."""
        passed: list[socket.socket] = []
        for _ in range(_ACCEPTS_MAX):
            try:
                connection, address = self.listening.accept()
            except BlockingIOError:
                break
            except ConnectionError:  # the other end has closed it again
                continue
            except OSError as error:
                self._make_room(error)
                break
            self._num_new += 1
            if self._lead is None:
                passed.append(connection)
                continue
            self._watch(self._lead(connection), PROOF_S)
            if (leaves := self._places.add(connection.fileno(), address[0])) is not None:
                self._forget(leaves).close()
            # What it says has mostly come with it.
            passed += self._advance(connection.fileno())
        return passed

    def _make_room(self, error: OSError) -> None:
        """Give the next connection the descriptor of one that has not passed."""
        if self._places:
            self._forget(self._places.oldest()).close()
            return
        # Without a descriptor the next try fails at once.
        self._deaf_until_s = time.monotonic() + _DEAF_S
        self._epoll.modify(self.listening, 0)
        self._complain(error)

    def _advance(self, number: int) -> list[socket.socket]:
        """Lead a connection on, and return it where it has passed; closes one that cannot pass."""
        way = self._waiting[number].way
        try:
            if way.advance():
                return [self._forget(number)]
        except NOT_YET:
            pass
        except (OSError, ValueError):
            self._forget(number).close()
            return []
        if not way.is_stranger:
            self._places.remove(number)
        return []

    def _watch(self, way: Way, within_s: float) -> None:
        self._epoll.register(way.socket, select.EPOLLIN)
        self._waiting[way.socket.fileno()] = _Waiting(way, time.monotonic() + within_s)

    def _forget(self, number: int) -> socket.socket:
        self._places.remove(number)
        with suppress(OSError):  # TLS has closed it
            self._epoll.unregister(number)
        return self._waiting.pop(number).way.socket
