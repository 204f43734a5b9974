"""The least daemon that AWS's checkpointing library works with: bytes in a dict.

    python -m benchmarks.checkpoint_minimal PORT

No checksums, no budget, no memory that outlives it: what a door that does all that has to
be as fast as. Keeps as many complete steps as its namespace is told.
"""

from __future__ import annotations

import collections
import json
import re
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

NAMESPACE = re.compile(r"/v1/cp/namespaces/([^/]+)")
LATEST = re.compile(r"/v1/cp/checkpoints/([^/]+)/latest")
SHARD = re.compile(r"/v1/cp/checkpoints/([^/]+)/(\d+)/(\d+)")
BLOCK_BYTES = 8 << 20
SOCKET_BYTES = 4 << 20

Shard = tuple[str, bytearray]


class Space:
    """The steps of one namespace."""

    def __init__(self, num_ranks: int, steps_retained: int) -> None:
        self.num_ranks = num_ranks
        self.steps_retained = steps_retained
        self.steps: dict[int, dict[int, Shard]] = collections.defaultdict(dict)

    def complete(self) -> list[int]:
        """Return the steps of which all ranks are there, newest first."""
        return sorted(
            (step for step, shards in self.steps.items() if len(shards) >= self.num_ranks),
            reverse=True,
        )

    def put(self, step: int, rank: int, shard: Shard) -> None:
        """Keep a shard, and no more complete steps than wanted."""
        self.steps[step][rank] = shard
        for old in self.complete()[self.steps_retained :]:
            del self.steps[old]


class Server(ThreadingHTTPServer):
    """All namespaces."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()
        self.spaces: dict[str, Space] = {}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        """Give the connection large buffers."""
        super().setup()
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self.connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - theirs
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer what is there."""
        path = urlsplit(self.path).path
        with self.server.lock:
            if found := SHARD.fullmatch(path):
                space = self.server.spaces.get(found[1])
                steps = space.steps if space else {}
                shard = steps.get(int(found[3]), {}).get(int(found[2]))
            elif found := LATEST.fullmatch(path):
                space = self.server.spaces.get(found[1])
                shard = ("", bytearray(json.dumps(space.complete()).encode())) if space else None
            else:
                found = NAMESPACE.fullmatch(path)
                shard = ("", bytearray(b"{}")) if found and found[1] in self.server.spaces else None
        if shard is None:
            self.answer(HTTPStatus.NOT_FOUND)
        else:
            self.answer(HTTPStatus.OK, shard)

    def do_POST(self) -> None:
        """Take a shard or a namespace."""
        body = self.read_body()
        target = urlsplit(self.path)
        with self.server.lock:
            if found := SHARD.fullmatch(target.path):
                space = self.server.spaces.get(found[1])
                if space is None:
                    return self.answer(HTTPStatus.NOT_FOUND)
                meta = self.headers["Shard-Meta"]
                space.put(int(found[3]), int(found[2]), (meta, body))
            elif found := NAMESPACE.fullmatch(target.path):
                query = parse_qs(target.query)
                self.server.spaces[found[1]] = Space(
                    int(query["num_ranks"][0]), int(query["steps_retained"][0])
                )
        return self.answer(HTTPStatus.OK)

    def read_body(self) -> bytearray:
        """Return a request's body."""
        body = bytearray(int(self.headers.get("Content-Length") or 0))
        rest = memoryview(body)
        while rest:
            rest = rest[self.rfile.readinto(rest[:BLOCK_BYTES]) :]
        return body

    def answer(self, status: HTTPStatus, shard: Shard | None = None) -> None:
        """Send an answer."""
        meta, body = shard or ("", bytearray())
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if meta:
            self.send_header("Shard-Meta", meta)
        self.end_headers()
        if body:
            self.connection.sendall(body)


if __name__ == "__main__":
    server = Server(int(sys.argv[1]))
    print("ready", flush=True)
    server.serve_forever()
