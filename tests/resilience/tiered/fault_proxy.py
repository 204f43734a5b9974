"""A TCP proxy between a client and a server that does what networks do on bad days."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["delay", "refuse", "hang", "status", "cut_up", "cut_down"]

_CHUNK_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Fault:
    """What goes wrong, from now on or a number of times."""

    kind: Kind
    times: float = float("inf")
    """How many connections it happens to."""
    after_bytes: int = 0
    """A connection is cut when so many bytes have passed it in that direction."""
    delay_s: float = 0.0
    status: int = 503
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take(self) -> bool:
        """Return whether it happens once more."""
        with self._lock:
            self.times -= 1
            return self.times >= 0


class FaultProxy:
    """Passes everything on to a port, but for the fault of the moment."""

    def __init__(self, port: int, *, listens_at: int = 0) -> None:
        self.bytes_up = 0
        """Bytes that clients sent and that were passed on."""
        self._to_port = port
        self._fault: Fault | None = None
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._listener = socket.create_server(("127.0.0.1", listens_at), backlog=256)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def fault(self) -> Fault | None:
        return self._fault

    def begin(self, fault: Fault) -> None:
        """Let the fault happen; connections that are open and idle are ended."""
        self._fault = fault
        self.cut()

    def end(self) -> None:
        """Pass everything on again; what hangs is cut."""
        self._fault = None
        changed, self._changed = self._changed, threading.Event()
        changed.set()
        self.cut()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end()
        self._thread.join()

    def wait(self, seconds: float | None) -> None:
        """Wait as long, or until the fault ends."""
        self._changed.wait(seconds)

    def count_up(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_up += num_bytes

    def forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def note(self, data: bytes, *, is_up: bool) -> None:
        """Take note of what is passed on, either way."""

    def tamper(self, data: bytes, passed: int) -> bytes | None:
        """Return what is passed on of what a client sends; None where its connection is cut."""
        return data

    def cut(self) -> None:
        """End all connections that there are, in the middle of whatever passes."""
        with self._lock:
            links = list(self._links)
        for each in links:
            each.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            fault = self._fault
            if fault and fault.kind == "refuse" and fault.take():
                _reset(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._to_port))
            except OSError:
                _reset(client)
                continue
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()


class Recorder(FaultProxy):
    """Remembers all bytes that it passes on: what a sniffer between two nodes sees."""

    def __init__(self, port: int, *, listens_at: int = 0) -> None:
        self.seen = bytearray()
        self.up, self.down = bytearray(), bytearray()
        """The same by its direction: what clients have said, and what they were answered."""
        super().__init__(port, listens_at=listens_at)

    def note(self, data: bytes, *, is_up: bool) -> None:
        with self._lock:
            self.seen += data
            said = self.up if is_up else self.down
            said += data


class _Link:
    """One connection of a client and its connection to the server."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._running = 2
        self._lock = threading.Lock()

    def start(self) -> None:
        for way in (self._pass_up, self._pass_down):
            threading.Thread(target=self._run, args=(way,), daemon=True).start()

    def cut(self) -> None:
        """End both connections at once, in the middle of whatever passes."""
        for each in (self._client, self._server):
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)

    def _run(self, way: Callable[[], bool]) -> None:
        is_orderly = False
        with suppress(OSError):
            is_orderly = way()
        with self._lock:
            self._running -= 1
            is_last = not self._running
        if not is_orderly:
            self.cut()
        if is_last:
            self._proxy.forget(self)
            self._client.close()
            self._server.close()

    def _pass_up(self) -> bool:
        """Pass on what the client sends, its end as well; False where the connection is cut."""
        passed = 0
        while data := self._client.recv(_CHUNK_BYTES):
            fault = self._proxy.fault
            if fault and fault.kind == "hang" and fault.take():
                self._proxy.wait(None)
                return False
            if fault and fault.kind == "status" and fault.take():
                self._answer(fault.status)
                return False
            if fault and fault.kind == "delay":
                self._proxy.wait(fault.delay_s)
            if _is_cut(fault, "cut_up", passed + len(data)):
                self._server.sendall(data[: len(data) // 2])
                return False
            tampered = self._proxy.tamper(data, passed)
            if tampered is None:
                return False
            self._proxy.note(tampered, is_up=True)
            self._server.sendall(tampered)
            passed += len(data)
            self._proxy.count_up(len(data))
        self._server.shutdown(socket.SHUT_WR)
        return True

    def _pass_down(self) -> bool:
        """Pass on what the server sends, its end as well; False where the connection is cut."""
        passed = 0
        while data := self._server.recv(_CHUNK_BYTES):
            if _is_cut(self._proxy.fault, "cut_down", passed + len(data)):
                self._client.sendall(data[: len(data) // 2])
                return False
            self._proxy.note(data, is_up=False)
            self._client.sendall(data)
            passed += len(data)
        self._client.shutdown(socket.SHUT_WR)
        return True

    def _answer(self, status: int) -> None:
        """Answer in place of the server, and read on until the client has had enough."""
        code = {403: "ExpiredToken", 500: "InternalError", 503: "SlowDown"}[status]
        body = f"<Error><Code>{code}</Code><Message>as ordered</Message></Error>"
        self._client.sendall(
            f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        self._client.shutdown(socket.SHUT_WR)
        self._client.settimeout(5)
        while self._client.recv(_CHUNK_BYTES):
            pass


def _is_cut(fault: Fault | None, kind: Kind, passed: int) -> bool:
    return bool(fault and fault.kind == kind and passed > fault.after_bytes and fault.take())


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()


@contextmanager
def fault_proxy(port: int) -> Iterator[FaultProxy]:
    """Give a proxy before a port of this machine."""
    proxy = FaultProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
