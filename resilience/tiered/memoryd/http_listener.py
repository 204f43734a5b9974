"""Takes connections for the HTTP door: so many at once, a thread each, and no more.

Who comes beyond that is told so and left in peace for a moment, all in the listener's one
thread: to close at once would throw away the answer with the request that is on its way.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

from resilience.tiered.memoryd.http_messages import format_head

_BACKLOG = 1024
_REFUSED_MAX = 256
"""Refused connections that are still open; the oldest are closed for new ones."""
_REFUSED_S = 2.0
_PAUSE_S = 0.1
"""How long no connection is taken where the process has no descriptor left."""
_END_S = 10.0

_TEXT = b"too many connections\n"
_REFUSAL = (
    format_head(
        HTTPStatus.SERVICE_UNAVAILABLE, [("Retry-After", "1"), ("Connection", "close")], len(_TEXT)
    )
    + _TEXT
)


class Listener:
    """Calls `serve` with each connection, in a thread of its own, and closes it thereafter."""

    def __init__(
        self,
        host: str,
        port: int,
        serve: Callable[[socket.socket], None],
        *,
        connections_max: int,
        strangers_max: int | None = None,
    ) -> None:
        """Take connections, of which `strangers_max` may be such as `welcome` does not know."""
        self.address = (host, port)
        self._serve = serve
        self._connections_max = connections_max
        self._strangers_max = connections_max if strangers_max is None else strangers_max
        self._strangers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._refused: dict[socket.socket, float] = {}
        """When each is closed at the latest; only for the listener's thread."""
        self._is_closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="http-listener", daemon=True)
        self._listening: socket.socket | None = None

    @property
    def is_closing(self) -> bool:
        """Return whether all is to end."""
        return self._is_closing.is_set()

    def start(self) -> None:
        """Listen; raises OSError where the address cannot be had."""
        family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
        listening = socket.create_server(self.address, family=family, backlog=_BACKLOG)
        listening.setblocking(False)  # noqa: FBT003
        self._listening = listening
        self.address = listening.getsockname()[:2]
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end all connections and wait for their threads; once."""
        self._is_closing.set()
        self._waker.close()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            open_ = dict(self._open)
            for connection in open_:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        deadline_s = time.monotonic() + _END_S
        for thread in open_.values():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        for each in (self._listening, self._wake, *self._refused):
            if each is not None:
                each.close()
        self._selector.close()

    def welcome(self, connection: socket.socket) -> None:
        """Count a connection as that of somebody who is known; again makes no difference."""
        with self._lock:
            self._strangers.discard(connection)

    def _run(self) -> None:
        while not self.is_closing:
            ends_s = next(iter(self._refused.values()), None)
            timeout_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj is self._listening:
                    self._take()
                elif key.fileobj is not self._wake:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read_refused(key.fileobj)
            now_s = time.monotonic()
            for connection in [each for each, ends_s in self._refused.items() if ends_s <= now_s]:
                self._close_refused(connection)

    def _take(self) -> None:
        assert self._listening is not None
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._is_closing.wait(_PAUSE_S)
            return
        thread = threading.Thread(
            target=self._serve_one, args=(connection,), name="http-connection", daemon=True
        )
        with self._lock:
            is_taken = (
                len(self._open) < self._connections_max
                and len(self._strangers) < self._strangers_max
            )
            if is_taken:
                self._open[connection] = thread
                self._strangers.add(connection)
        if not is_taken:
            self._refuse(connection)
            return
        try:
            thread.start()
        except RuntimeError:
            # No thread to be had: as if there were too many connections.
            with self._lock:
                del self._open[connection]
                self._strangers.discard(connection)
            self._refuse(connection)

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            with self._lock:
                del self._open[connection]
                self._strangers.discard(connection)
                connection.close()

    def _refuse(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)  # noqa: FBT003
            connection.send(_REFUSAL)
            connection.shutdown(socket.SHUT_WR)
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError:
            connection.close()
            return
        self._refused[connection] = time.monotonic() + _REFUSED_S
        if len(self._refused) > _REFUSED_MAX:
            self._close_refused(next(iter(self._refused)))

    def _read_refused(self, connection: socket.socket) -> None:
        """Read what a refused client sends; it is for nobody."""
        try:
            if connection in self._refused and not connection.recv(1 << 16):
                self._close_refused(connection)
        except BlockingIOError:
            return
        except OSError:
            self._close_refused(connection)

    def _close_refused(self, connection: socket.socket) -> None:
        if self._refused.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()
