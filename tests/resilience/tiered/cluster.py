"""Daemons that are each other's peers, and a wire between them that can be tampered with."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from resilience.tiered.shard import ShardId
from tests.ports import free_ports
from tests.resilience.tiered.daemons import LIMIT_S, Daemon, load

_CHUNK_BYTES = 64 << 10


class Wire:
    """Passes bytes on to a port; may stop, or flip a bit, where so many have gone up."""

    def __init__(self, port: int, to_port: int) -> None:
        self.stop_at: int | None = None
        self.flip_at: list[int] = []
        """Places in the stream of a connection, each for the first one that gets there."""
        self.is_stopped = threading.Event()
        self.bytes_up = 0
        self._to_port = to_port
        self._go_on = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Stop nothing any more; what was stopped is cut."""
        self.stop_at = None
        self._go_on.set()

    def cut(self) -> None:
        """End all connections that there are, in the middle of whatever passes."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.go_on()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in (self._thread, *self._threads):
            thread.join(LIMIT_S)
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to_port))
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            for args in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pass_on, args=args, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        done = 0
        with suppress(OSError):
            while data := bytearray(source.recv(_CHUNK_BYTES)):
                if is_up:
                    self._tamper(data, done)
                    self.bytes_up += len(data)
                    done += len(data)
                    if self.stop_at is not None and done >= self.stop_at:
                        self.is_stopped.set()
                        self._go_on.wait(LIMIT_S)
                        break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _tamper(self, data: bytearray, done: int) -> None:
        for place in [each for each in self.flip_at if done <= each < done + len(data)]:
            data[place - done] ^= 4
            self.flip_at.remove(place)


@dataclass
class Cluster:
    """Nodes by name: each in its own failure domain."""

    nodes: dict[str, Daemon] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    wires: dict[tuple[str, str], Wire] = field(default_factory=dict)
    """By who connects and to whom."""

    def __getitem__(self, name: str) -> Daemon:
        return self.nodes[name]

    def start(self, *names: str) -> None:
        for each in names or self.nodes:
            self.nodes[each].start()


@contextmanager
def make_cluster(
    folder: Path,
    names: Sequence[str] = "ab",
    *,
    wired: Sequence[tuple[str, str]] = (),
    budget_mib: int = 64,
    options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Make nodes that are not started; `wired` connect through a wire."""
    cluster = Cluster()
    ports = free_ports(len(names) + len(wired))
    cluster.ports = dict(zip(names, ports, strict=False))
    wire_ports = dict(zip(wired, ports[len(names) :], strict=True))
    with ExitStack() as stack:
        for pair, port in wire_ports.items():
            wire = cluster.wires[pair] = Wire(port, cluster.ports[pair[1]])
            stack.callback(wire.close)
        for name in names:
            words = ["--node", name, "--peer-listen", f"127.0.0.1:{cluster.ports[name]}"]
            for other in names:
                if other != name:
                    port = wire_ports.get((name, other), cluster.ports[other])
                    words += ["--peer", f"{other}=127.0.0.1:{port}"]
            daemon = Daemon(folder=folder / name, budget_mib=budget_mib, options=[*words, *options])
            cluster.nodes[name] = stack.enter_context(daemon)
        yield cluster


def wait_until(is_true: Callable[[], bool], daemon: Daemon | None = None) -> None:
    """Wait for what other processes bring about."""
    end_s = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > end_s:
            raise AssertionError(daemon.client(None).status() if daemon else "it did not come")
        time.sleep(0.02)


def count_held(daemon: Daemon, shard_id: ShardId) -> int:
    """Return how many shards of a shard's step a daemon holds itself."""
    with daemon.client(None) as client:
        steps = client.status()["namespaces"].get(shard_id.namespace, [])
    return sum(
        each["num_held"]
        for each in steps
        if (each["step"], each["generation"]) == (shard_id.step, shard_id.generation)
    )


def wait_held(daemon: Daemon, *ids: ShardId) -> None:
    """Wait until a daemon holds the steps of all of these, each of one shard."""
    wait_until(lambda: all(count_held(daemon, each) for each in ids), daemon)


def load_own(daemon: Daemon, shard_id: ShardId, job: str = "job") -> bytes:
    """Return a shard's bytes from the daemon's own memory."""
    with daemon.client(shard_id.namespace, job=job) as client:
        return load(client, shard_id)
