"""Stores of generations for ranks that no agent has started: the real ones, over TCP.

One process serves them, at an address that a store of torch's, the `book`, has for the others.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from typing import Any

from torch.distributed.distributed_c10d import Store

from resilience.comm.agent_store import AgentStore
from resilience.comm.generation_store import Client, GenerationStore
from resilience.comm.messages import LineReader, Message, StoreReply, StoreRequest, encode

_HOST = "127.0.0.1"


class Server:
    """Serves calls as the agents of a node and its coordinator do."""

    def __init__(self) -> None:
        self._stores: dict[int, GenerationStore] = {}
        self._callers: dict[Client, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._listening = socket.create_server((_HOST, 0))
        self._selector.register(self._listening, selectors.EVENT_READ)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, name="stores", daemon=True).start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.fileobj, *key.data)

    def _accept(self) -> None:
        accepted, _ = self._listening.accept()
        caller = (0, accepted.fileno())
        self._callers[caller] = accepted
        self._selector.register(accepted, selectors.EVENT_READ, (caller, LineReader()))

    def _read(self, connection: Any, caller: Client, reader: LineReader) -> None:
        try:
            data = connection.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            del self._callers[caller]
            connection.close()
        for message in reader.feed(data):
            assert isinstance(message, StoreRequest)
            store = self._stores.setdefault(message.generation, GenerationStore(message.generation))
            for to, reply in store.serve(caller, message):
                if to in self._callers:
                    self._callers[to].sendall(encode(reply))


def serve_stores(book: Store) -> None:
    """Serve stores in a thread of this process, to all that have the book."""
    book.set("stores", str(Server().port))


def open_store(book: Store, generation: int) -> AgentStore:
    """Return a generation's store."""
    return connect_store(int(book.get("stores")), generation)


def connect_store(port: int, generation: int) -> AgentStore:
    """Return a generation's store that a process serves at a port."""
    return _links.setdefault((os.getpid(), port), _Link(port)).open_store(generation)


class _Link:
    """A process's one connection to the server, as a worker has one to its agent."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()
        self._stores: dict[int, AgentStore] = {}

    def open_store(self, generation: int) -> AgentStore:
        if self._socket is None:
            self._socket = socket.create_connection((_HOST, self._port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._hear, args=[self._socket], daemon=True).start()
        return self._stores.setdefault(generation, AgentStore(generation, self._send))

    def _send(self, message: Message) -> None:
        assert self._socket is not None
        with self._sending:
            self._socket.sendall(encode(message))

    def _hear(self, connection: socket.socket) -> None:
        reader = LineReader()
        while data := connection.recv(1 << 16):
            for message in reader.feed(data):
                assert isinstance(message, StoreReply)
                self._stores[message.generation].take(message)


_links: dict[tuple[int, int], _Link] = {}
