"""Takes connections for a door: so many at once, a thread each, and no more.

A connection beyond them is told so, and lingers until it has read that. A connection over TCP gets
a thread after the proof of the token, one over HTTP after the head of its first request.
`runtime.server` accepts all of them, in the listener's one thread.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from resilience.runtime.server import BACKLOG, Server, Way
from resilience.tiered.memoryd.output import complain

_CLOSE_TIMEOUT_S = 10.0
_LAST_WORDS_S = 1.0
"""How long an answer that is in hand may take when all is to end."""


class Listener:
    """Calls `serve` with each connection, in a thread of its own, and closes it thereafter.

    A connection first goes the way on which `lead` sends it. `refuse` is called with one too many,
    which it may tell so without waiting. `name` is for threads; the `complaint` is printed where
    none can be accepted.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[socket.socket], None],
        *,
        complaint: str,
        connections_max: int,
        lead: Callable[[socket.socket], Way] | None = None,
        refuse: Callable[[socket.socket], object] = lambda connection: None,
    ) -> None:
        self._name = name
        self._serve = serve
        self._complaint = complaint
        self._connections_max = connections_max
        self._lead = lead
        self._refuse = refuse
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, socket.socket] = {}
        self._is_closing = threading.Event()
        self._server: Server | None = None
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
        self._server = Server(listening, self._lead, complain=self._complain)
        self._thread.start()

    def close(self, within_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop listening, end all connections and wait some seconds for their threads; once."""
        end_s = time.monotonic() + within_s
        self._is_closing.set()
        if self._server is not None:
            with suppress(OSError):  # which wakes the thread
                self._server.listening.shutdown(socket.SHUT_RDWR)
            self._thread.join(within_s)
        self._hang_up(socket.SHUT_RD, min(end_s, time.monotonic() + _LAST_WORDS_S))
        self._hang_up(socket.SHUT_RDWR, end_s)
        if self._server is not None:
            self._server.close()

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

    def _run(self) -> None:
        assert self._server
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        while not self.is_closing:
            rest_s = self._server.tick(time.monotonic()) - time.monotonic()
            poll.poll(None if math.isinf(rest_s) else max(0.0, rest_s) * 1000)
            for connection in self._server.take():
                connection.setblocking(True)  # noqa: FBT003
                self._hand_over(connection)

    def _complain(self, error: OSError) -> None:
        if not self.is_closing:
            complain(f"{self._complaint}: {error}")

    def _hand_over(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve_one, args=(connection,), name=f"{self._name}-connection", daemon=True
        )
        if not self._give_thread(connection, thread):
            self._turn_away(connection)

    def _give_thread(self, connection: socket.socket, thread: threading.Thread) -> bool:
        """Give a connection to a thread, if there may be one more."""
        with self._lock:
            if len(self._open) >= self._connections_max:
                return False
            try:
                thread.start()
            except RuntimeError:  # the system has no more of them
                return False
            self._open[thread] = connection
            return True

    def _serve_one(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except Exception:  # noqa: BLE001 - one connection's fault is not the daemon's
            complain(traceback.format_exc())
        finally:
            with self._lock:
                self._open.pop(threading.current_thread()).close()

    def _turn_away(self, connection: socket.socket) -> None:
        assert self._server
        with suppress(OSError):
            self._refuse(connection)
        self._server.linger(connection)


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raises OSError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)
