"""Daemons that are each other's peers, and a wire between them that can be tampered with."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from resilience.tiered.shard import ShardId
from tests.ports import free_ports
from tests.resilience.tiered.daemons import LIMIT_S, Daemon, load
from tests.resilience.tiered.fault_proxy import Recorder
from tests.waiting import wait_until


class Wire(Recorder):
    """Passes bytes on to a port; may stop, or flip a bit, where so many have gone up."""

    def __init__(self, port: int, to_port: int) -> None:
        self.stop_at: int | None = None
        self.flip_at: list[int] = []
        """Places in the stream of a connection, each for the first one that gets there."""
        self.is_stopped = threading.Event()
        self._go_on = threading.Event()
        super().__init__(to_port, listens_at=port)

    def go_on(self) -> None:
        """Stop nothing any more; what was stopped is cut."""
        self.stop_at = None
        self._go_on.set()

    def close(self) -> None:
        self.go_on()
        super().close()

    def tamper(self, data: bytes, passed: int) -> bytes | None:
        flipped, end = bytearray(data), passed + len(data)
        for place in [each for each in self.flip_at if passed <= each < end]:
            flipped[place - passed] ^= 4
            self.flip_at.remove(place)
        if self.stop_at is not None and end >= self.stop_at:
            self.is_stopped.set()
            self._go_on.wait(LIMIT_S)
            return None
        return bytes(flipped)


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
            words = ["--node", name]
            if len(names) > 1:
                words += ["--peer-listen", f"127.0.0.1:{cluster.ports[name]}"]
            for other in names:
                if other != name:
                    port = wire_ports.get((name, other), cluster.ports[other])
                    words += ["--peer", f"{other}=127.0.0.1:{port}"]
            daemon = Daemon(folder=folder / name, budget_mib=budget_mib, options=[*words, *options])
            cluster.nodes[name] = stack.enter_context(daemon)
        yield cluster


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
    wait_until(lambda: all(count_held(daemon, each) for each in ids), daemon.client(None).status)


def load_own(daemon: Daemon, shard_id: ShardId, job: str = "job") -> bytes:
    """Return a shard's bytes from the daemon's own memory."""
    with daemon.client(shard_id.namespace, job=job) as client:
        return load(client, shard_id)
