"""Connections between agents: messages as lines over TCP."""

from __future__ import annotations

import socket
from contextlib import suppress

from resilience.comm.messages import LineReader, Message, encode

SEND_DEADLINE_S = 5.0
CONNECT_DEADLINE_S = 5.0


class AgentConnection:
    """One connection to another agent."""

    def __init__(self, connection: socket.socket) -> None:
        self.node: str | None = None
        """Who is at the other end, once it has said so."""
        self.heard_s = 0.0
        connection.settimeout(SEND_DEADLINE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection
        self._reader = LineReader()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._connection.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; False where the other end is gone, or takes nothing any more."""
        try:
            self._connection.sendall(encode(message))
        except OSError:
            # Half a message may be on its way: nothing can follow it.
            self.hang_up()
            return False
        return True

    def read(self) -> list[Message] | None:
        """Return what has come, without waiting; None where the other end is gone."""
        try:
            data = self._connection.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        try:
            return self._reader.feed(data)
        except ValueError:
            # Not an agent of ours; to talk on would be guessing.
            return None

    def hang_up(self) -> None:
        """End the connection; whoever waits for it, here as well, finds it ended."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def listen(host: str) -> socket.socket:
    """Return a socket that other agents can connect to, on a free port."""
    listener = socket.create_server((host, 0), backlog=1024)
    listener.setblocking(False)  # noqa: FBT003
    return listener


def connect(address: str) -> AgentConnection:
    """Return a connection to an agent; raises OSError where there is none in time."""
    host, _, port = address.rpartition(":")
    return AgentConnection(socket.create_connection((host, int(port)), timeout=CONNECT_DEADLINE_S))


def own_address(endpoint_host: str) -> str:
    """Return the address of this machine by which the endpoint is reached."""
    try:
        family, _, _, _, target = socket.getaddrinfo(
            endpoint_host, 9, type=socket.SOCK_DGRAM, proto=socket.IPPROTO_UDP
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
