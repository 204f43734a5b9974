"""Connections between agents: messages as lines over TCP, behind a door.

One epoll for all of them, read and written by the agent's one thread, which waits for none. The
kernel notices a host that is gone: what it sends is not acknowledged, and probes where nothing is
sent. What a stranger can make this process hold is a place among few, some bytes and a few seconds.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import math
import os
import select
import socket
import ssl
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from resilience.agent.connections.name_lookup import NameLookup, SocketAddress
from resilience.agent.connections.transport import NO_AGENT, Arrival, Came, Gone, Heard, Reached
from resilience.arguments import NO_NAME
from resilience.comm.messages import LINE_BYTES_MAX, LineReader, Message, StoreReply, encode
from resilience.runtime.door import AGENTS, DoorError
from resilience.runtime.server import Credentials, Passage, Server
from resilience.runtime.tls import NOT_YET, Tls, explain_tls
from resilience.runtime.wake import Wake

QUEUE_BYTES_MAX = LINE_BYTES_MAX
_READ_BYTES = 1 << 20
_RECORD_BYTES = 16 << 10
"""TLS says how much it has sent after each record."""
_UNREAD_MAX = 16
_PROBE_S_MAX = 32767
"""Linux takes no more."""


@dataclass(slots=True, eq=False)
class _Connection:
    peer: int
    deadline_s: float = math.inf
    """When it is overdue in what it does now; inf for one that waits for nothing."""
    is_passed: bool = False
    socket: socket.socket | None = None
    descriptor: int = -1
    mask: int = 0
    """What its socket is waited for."""
    passage: Passage | None = None
    """Its way through the door, once it is dialed."""
    targets: list[SocketAddress] = field(default_factory=list)
    """Addresses of the host that have not been tried yet."""
    reader: LineReader = field(default_factory=LineReader)
    waiting: bytearray = field(default_factory=bytearray)
    """What is to be sent."""
    replies: deque[StoreReply] = field(default_factory=deque)
    """Replies of the store, sent after it. They share a value that many get until then."""


class TcpTransport:
    """The agent's connections over TCP; see `Transport`.

    Takes over a socket of `listen`. An empty token lets everybody in who reaches it.
    """

    def __init__(
        self, listening: socket.socket, *, token: str, lease_s: float, tls: Tls | None = None
    ) -> None:
        self._credentials = Credentials(kind=AGENTS, token=token, tls=tls)
        self._server = Server(listening, self._credentials.accept)
        self._lease_s = lease_s
        self._numbers = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._inbox: list[Arrival] = []
        self._due_s = math.inf
        self._epoll = select.epoll()
        self._wake = Wake()
        self._lookup = NameLookup(self._wake.set)
        self._epoll.register(self._server, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)

    @property
    def address(self) -> str:
        """Return HOST:PORT at which other agents reach this one."""
        host, port, *_ = self._server.listening.getsockname()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def fileno(self) -> int:
        """Return a descriptor that is readable while `receive` has something to return."""
        return self._epoll.fileno()

    def connect(self, address: str) -> int:
        """Begin to connect to HOST:PORT, and return the peer's number."""
        deadline_s = time.monotonic() + self._lease_s
        connection = self._add(_Connection(next(self._numbers), deadline_s))
        try:
            connection.targets = list(self._lookup.find(connection.peer, address))
        except (argparse.ArgumentTypeError, OSError) as error:
            self._lose(connection, _explain(error))
        else:
            if connection.targets:
                self._dial(connection, "")
        self._wake_for_inbox()
        return connection.peer

    def send(self, peer: int, message: Message) -> None:
        """Say something to a peer, or to nobody where it is gone."""
        connection = self._connections.get(peer)
        if connection is None:
            return
        if isinstance(message, StoreReply) and connection.waiting:
            connection.replies.append(message)
            return
        data = encode(message)
        if len(connection.waiting) + len(data) > QUEUE_BYTES_MAX:
            self._lose(connection, f"more than {QUEUE_BYTES_MAX} bytes wait for it")
            self._wake_for_inbox()
            return
        connection.waiting += data
        if connection.is_passed and len(connection.waiting) == len(data):
            self._flush(connection)

    def hang_up(self, peer: int) -> None:
        """End a connection; nothing of the peer comes any more, `Gone` neither."""
        connection = self._connections.get(peer)
        if connection is not None:
            if connection.is_passed:
                self._flush(connection)
            self._drop(connection)
        self._inbox = [each for each in self._inbox if each.peer != peer]

    def receive(self) -> list[Arrival]:
        """Return what has come since the last call, each peer's in its order."""
        self._serve_ready()
        came, self._inbox = self._inbox, []
        return came

    def tick(self, now_s: float) -> float:
        """End what is overdue; returns the time of the next deadline, inf where there is none."""
        self._serve_ready()
        late_s = now_s - self._due_s
        for connection in list(self._connections.values()):
            if late_s > self._lease_s / 10:
                # It was this process that stood still: what answers it may be on its way.
                connection.deadline_s = max(connection.deadline_s, now_s + self._lease_s)
            if connection.deadline_s <= now_s:
                silent = f"{NO_AGENT}: it accepts the connection and stays silent"
                self._lose(connection, silent if connection.passage else "it does not answer")
        deadlines_s = [each.deadline_s for each in self._connections.values()]
        self._due_s = min([*deadlines_s, self._server.tick(now_s)])
        self._wake_for_inbox()
        return self._due_s

    def close(self) -> None:
        """End all connections, as `hang_up` does, and take no more."""
        for peer in list(self._connections):
            self.hang_up(peer)
        self._server.close()
        self._epoll.close()

    # ---- what is ready

    def _serve_ready(self) -> None:
        self._wake.clear()
        # A descriptor's number may be another connection's before this round is over.
        ready = [(self._by_descriptor.get(each), each, mask) for each, mask in self._epoll.poll(0)]
        for connection, descriptor, mask in ready:
            if descriptor == self._server.fileno():
                for each in self._server.take():
                    self._adopt(each)
            elif connection is not None and connection.peer in self._connections:
                self._serve(connection, mask)
        for peer, answer in self._lookup.answers():
            found = self._connections.get(peer)
            if found is None:
                continue
            if isinstance(answer, Exception):
                self._lose(found, f"{NO_NAME}: {_explain(answer)}")
            else:
                found.targets = list(answer)
                self._dial(found, "")

    def _serve(self, connection: _Connection, mask: int) -> None:
        if connection.passage:
            self._pass(connection, connection.passage)
            return
        if not connection.is_passed:
            self._finish_dialing(connection)
            return
        if mask & select.EPOLLOUT:
            self._flush(connection)
        if mask & ~select.EPOLLOUT:
            self._read(connection)

    def _adopt(self, accepted: socket.socket) -> None:
        """Take a connection that has passed the door."""
        connection = self._add(_Connection(next(self._numbers), is_passed=True))
        self._open(connection, accepted, select.EPOLLIN)
        self._inbox.append(Came(peer=connection.peer))

    def _dial(self, connection: _Connection, problem: str) -> None:
        """Try the next address; without one the last `problem` is why there is no connection."""
        self._shut(connection)
        while connection.targets:
            family, target = connection.targets.pop(0)
            try:
                dialed = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError as error:
                problem = _explain(error)
                continue
            self._open(connection, dialed, select.EPOLLOUT)
            status = dialed.connect_ex(target)
            if status in (0, errno.EINPROGRESS):
                return
            problem = os.strerror(status)
            self._shut(connection)
        self._lose(connection, problem)

    def _finish_dialing(self, connection: _Connection) -> None:
        assert connection.socket
        status = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            self._dial(connection, os.strerror(status))
            return
        self._wait_for(connection, select.EPOLLIN)
        connection.passage = self._credentials.lead(connection.socket, connects=True)
        self._pass(connection, connection.passage)

    def _pass(self, connection: _Connection, passage: Passage) -> None:
        """Go on through the door of the other end."""
        try:
            is_passed = passage.advance()
        except (OSError, ValueError) as error:
            connection.socket = passage.socket
            problem = _explain(error)
            is_known = isinstance(error, DoorError)
            self._lose(connection, problem if is_known else f"{NO_AGENT}: {problem}")
            return
        connection.socket = passage.socket
        if is_passed:
            connection.is_passed, connection.passage = True, None
            connection.deadline_s = math.inf
            self._inbox.append(Reached(peer=connection.peer))
            self._flush(connection)

    def _read(self, connection: _Connection) -> None:
        assert connection.socket
        try:
            self._read_once(connection)
            # What TLS holds already, the kernel does not tell of.
            while isinstance(connection.socket, ssl.SSLSocket) and connection.socket.pending():
                self._read_once(connection)
        except NOT_YET:
            return
        except (OSError, ValueError) as error:
            # Not an agent of ours, or one that is gone: to talk on would be guessing.
            self._lose(connection, _explain(error))

    def _read_once(self, connection: _Connection) -> None:
        assert connection.socket
        data = connection.socket.recv(_READ_BYTES)
        if not data:
            self._lose(connection, "it has ended the connection")
        for message in connection.reader.feed(data):
            self._inbox.append(Heard(peer=connection.peer, message=message))

    def _flush(self, connection: _Connection) -> None:
        """Send what the other end takes."""
        assert connection.socket
        waiting = connection.waiting
        is_moving = math.isinf(connection.deadline_s)
        size = _RECORD_BYTES if self._credentials.tls else None
        while waiting or connection.replies:
            if not waiting:
                waiting += encode(connection.replies.popleft())
            try:
                with memoryview(waiting)[:size] as view:
                    num_sent = connection.socket.send(view)
            except NOT_YET:
                break
            except OSError:
                # What it said before it ended is still to be read, and then its end.
                waiting.clear()
                connection.replies.clear()
                break
            del waiting[:num_sent]
            is_moving = True
        if not waiting:
            connection.deadline_s = math.inf
        elif is_moving:
            connection.deadline_s = time.monotonic() + self._lease_s
        self._wait_for(connection, select.EPOLLIN | (select.EPOLLOUT if waiting else 0))

    def _wait_for(self, connection: _Connection, mask: int) -> None:
        if connection.socket is not None and connection.mask != mask:
            self._epoll.modify(connection.socket, mask)
            connection.mask = mask

    # ---- a connection's life

    def _add(self, connection: _Connection) -> _Connection:
        self._connections[connection.peer] = connection
        return connection

    def _open(self, connection: _Connection, opened: socket.socket, mask: int) -> None:
        opened.setblocking(False)  # noqa: FBT003
        probe_s = min(max(1, int(self._lease_s / 3)), _PROBE_S_MAX)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(self._lease_s * 1000)),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s),
        ):
            opened.setsockopt(level, option, value)
        connection.socket, connection.descriptor = opened, opened.fileno()
        self._by_descriptor[connection.descriptor] = connection
        self._epoll.register(opened, mask)
        connection.mask = mask

    def _shut(self, connection: _Connection) -> None:
        """Close the connection's socket, so that what was sent to an agent still arrives."""
        if connection.socket is None:
            return
        del self._by_descriptor[connection.descriptor]
        with suppress(OSError):  # TLS has closed it
            self._epoll.unregister(connection.descriptor)
        num_reads = _UNREAD_MAX if connection.is_passed else 0
        with connection.socket as opened, suppress(OSError):
            opened.shutdown(socket.SHUT_WR)
            # To close over what was not read would throw away what is on its way to the other end.
            while num_reads and opened.recv(_READ_BYTES):
                num_reads -= 1
        connection.socket = None

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.peer]
        self._shut(connection)

    def _lose(self, connection: _Connection, reason: str) -> None:
        self._drop(connection)
        self._inbox.append(Gone(peer=connection.peer, reason=reason))

    def _wake_for_inbox(self) -> None:
        if self._inbox:
            self._wake.set()


def _explain(error: Exception) -> str:
    is_tls = isinstance(error, ssl.SSLError)
    return (not is_tls and getattr(error, "strerror", None)) or explain_tls(error)
