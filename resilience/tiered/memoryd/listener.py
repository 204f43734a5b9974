"""Takes connections for a door: so many at once, a thread each, and no more.

A connection beyond them is told so and left open for a moment: to close it at once would throw
away the answer with the request that is on its way. Where a proof of the token is asked for, a
connection gets a thread after it, and after TLS's handshake. All this happens in the listener's one
thread.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from resilience.runtime.door import DAEMONS, PLACES_MAX, PROOF_S, Door, Strangers
from resilience.runtime.tls import NOT_YET, Tls, shake_hands
from resilience.tiered.memoryd.output import complain

BACKLOG = 1024
_REFUSED_MAX = 256
"""Refused connections that are still open; the oldest are closed for new ones."""
_REFUSED_S = 2.0
_PAUSE_S = 1.0
"""How long no connection is taken where the process has no descriptor left."""
_CLOSE_TIMEOUT_S = 10.0
_LAST_WORDS_S = 1.0
"""How long an answer that is in hand may take when all is to end."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A connection without a thread: it has to prove the token first, or was refused."""

    connection: socket.socket
    until_s: float
    """When it is closed at the latest."""
    door: Door | None = None
    """None for one that was refused."""
    is_shaking: bool = False
    """Whether the handshake of TLS is not over yet."""


class Listener:
    """Calls `serve` with each connection, in a thread of its own, and closes it thereafter.

    With `make_door` a connection has to pass a door first, within `tls` if there is one. Of the
    connections `strangers_max` may be without a call of `welcome`. `refuse` is called with one too
    many, which it may tell so without waiting. `name` is for threads; the `complaint` is printed
    where none can be accepted.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[socket.socket], None],
        *,
        complaint: str,
        connections_max: int,
        strangers_max: int | None = None,
        make_door: Callable[[], Door] | None = None,
        tls: Tls | None = None,
        refuse: Callable[[socket.socket], object] = lambda connection: None,
    ) -> None:
        self._name = name
        self._serve = serve
        self._complaint = complaint
        self._connections_max = connections_max
        self._strangers_max = strangers_max
        self._make_door = make_door
        self._tls = tls
        self._refuse = refuse
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._strangers: set[threading.Thread] = set()
        self._waiting: dict[int, _Waiting] = {}
        """By descriptor, the oldest first; only for the listener's thread."""
        # The other descriptors are for shards.
        self._places = Strangers(min(PLACES_MAX, os.sysconf("SC_OPEN_MAX") // 4))
        self._is_closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listening: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-listener", daemon=True)

    @property
    def is_closing(self) -> bool:
        """Return whether all is to end."""
        return self._is_closing.is_set()

    @property
    def num_open(self) -> int:
        """Return how many connections are served."""
        return len(self._open)

    def start(self, listening: socket.socket) -> None:
        """Take the connections of a socket that listens; it is the listener's from now on."""
        listening.setblocking(False)  # noqa: FBT003
        self._listening = listening
        self._selector.register(listening, selectors.EVENT_READ)
        self._thread.start()

    def close(self, within_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop listening, end all connections and wait some seconds for their threads; once."""
        end_s = time.monotonic() + within_s
        self._is_closing.set()
        if self._listening is not None:
            with suppress(OSError):  # which wakes the thread
                self._listening.shutdown(socket.SHUT_RDWR)
            if self._thread.ident is not None:
                self._thread.join(within_s)
            self._listening.close()
        self._hang_up(socket.SHUT_RD, min(end_s, time.monotonic() + _LAST_WORDS_S))
        self._hang_up(socket.SHUT_RDWR, end_s)
        for waiting in self._waiting.values():
            waiting.connection.close()
        self._selector.close()

    def _hang_up(self, how: int, end_s: float) -> None:
        """Shut all connections down, and wait for their threads."""
        with self._lock:
            threads = list(self._open)
            for connection in self._open.values():
                with suppress(OSError):
                    # Not TLS's own, after which the rest would be sent in the clear.
                    socket.socket.shutdown(connection, how)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def widen(self, num_connections: int) -> None:
        """Take so many connections more at once."""
        with self._lock:
            self._connections_max += num_connections

    def welcome(self) -> None:
        """Count this thread's connection as that of somebody who is known."""
        with self._lock:
            self._strangers.discard(threading.current_thread())

    def _run(self) -> None:
        while not self.is_closing:
            until_s = min((each.until_s for each in self._waiting.values()), default=None)
            timeout_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listening:
                    self._accept_one(key.fileobj)
                elif waiting := self._waiting.get(key.fd):
                    self._read(key.fd, waiting)
            now_s = time.monotonic()
            for number in [key for key, each in self._waiting.items() if each.until_s <= now_s]:
                self._forget(number).close()

    def _accept_one(self, listening: socket.socket) -> None:
        try:
            connection, address = listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Without descriptors the next try fails at once; some may be closed in a second.
            if not self._is_closing.wait(_PAUSE_S):
                complain(f"{self._complaint}: {error}")
            return
        if self._make_door is None:
            self._hand_over(connection)
            return
        until_s, is_shaking = time.monotonic() + PROOF_S, self._tls is not None
        self._watch(_Waiting(connection, until_s, self._make_door(), is_shaking))
        if (leaves := self._places.add(connection.fileno(), address[0])) is not None:
            self._forget(leaves).close()

    def _watch(self, waiting: _Waiting) -> None:
        waiting.connection.setblocking(False)  # noqa: FBT003
        self._selector.register(waiting.connection, selectors.EVENT_READ)
        self._waiting[waiting.connection.fileno()] = waiting

    def _forget(self, number: int) -> socket.socket:
        self._places.remove(number)
        self._selector.unregister(number)
        return self._waiting.pop(number).connection

    def _read(self, number: int, waiting: _Waiting) -> None:
        """Take in a part of a proof and answer it; the bytes of a refused client are dropped."""
        door = waiting.door
        try:
            if waiting.is_shaking:
                self._shake(waiting)
            data = waiting.connection.recv(door.num_wanted if door else 1 << 16)
            answer = door.feed(data) if door and data else b""
            # A new connection takes the few bytes of an answer at once.
            is_open = bool(data) and (not answer or waiting.connection.send(answer) == len(answer))
        except NOT_YET:
            return
        except (OSError, ValueError) as error:  # it is gone, or its proof is wrong
            if answer := getattr(error, "answer", b""):
                with suppress(OSError):
                    waiting.connection.send(answer)
            is_open = False
        if not is_open:
            self._forget(number).close()
        elif door and door.is_passed:
            connection = self._forget(number)
            connection.setblocking(True)  # noqa: FBT003
            self._hand_over(connection)

    def _shake(self, waiting: _Waiting) -> None:
        assert self._tls
        if not isinstance(waiting.connection, ssl.SSLSocket):
            waiting.connection = self._tls.wrap(waiting.connection, connects=False)
        shake_hands(waiting.connection, DAEMONS)
        waiting.is_shaking = False

    def _hand_over(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve_one, args=(connection,), name=f"{self._name}-connection", daemon=True
        )
        if not self._give_thread(connection, thread):
            self._turn_away(connection)

    def _give_thread(self, connection: socket.socket, thread: threading.Thread) -> bool:
        """Give a connection to a thread, if there may be one more."""
        with self._lock:
            if len(self._open) >= self._connections_max or len(self._strangers) >= (
                self._strangers_max or self._connections_max
            ):
                return False
            try:
                thread.start()
            except RuntimeError:  # the system has no more of them
                return False
            self._open[thread] = connection
            self._strangers.add(thread)
            return True

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except Exception:  # noqa: BLE001 - one connection's fault is not the daemon's
            complain(traceback.format_exc())
        finally:
            thread = threading.current_thread()
            with self._lock:
                self._strangers.discard(thread)
                self._open.pop(thread).close()

    def _turn_away(self, connection: socket.socket) -> None:
        try:
            self._refuse(connection)
            connection.shutdown(socket.SHUT_WR)
            self._watch(_Waiting(connection, time.monotonic() + _REFUSED_S))
        except OSError:
            connection.close()
            return
        refused = [number for number, each in self._waiting.items() if each.door is None]
        if len(refused) > _REFUSED_MAX:
            self._forget(refused[0]).close()


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises OSError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
