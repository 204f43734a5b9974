"""The kinds of transport, driven alike: waited for where they are real, moved on where not."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable
from typing import Protocol

from resilience.agent.connections.address import listen
from resilience.agent.connections.tcp_transport import TcpTransport
from resilience.agent.connections.transport import Arrival, Came, Heard, Reached, Transport
from resilience.comm.messages import Break, Message
from resilience.runtime.tls import derive_tls
from resilience.testing.network import Network

TOKEN = "of this run"
LIMIT_S = 60.0
"""What takes longer never comes."""


def say(number: int, text: str = "") -> Message:
    return Break(generation=number, reason=text)


class Node:
    """One agent's transport, and what has come to it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.arrived: list[Arrival] = []

    def heard(self, peer: int | None = None) -> list[int]:
        """Return the numbers of the messages that have come."""
        return [
            each.message.generation
            for each in self.arrived
            if isinstance(each, Heard)
            and isinstance(each.message, Break)
            and peer in (None, each.peer)
        ]

    def kinds(self, peer: int | None = None) -> list[str]:
        return [type(each).__name__ for each in self.arrived if peer in (None, each.peer)]


def pair(world: World) -> tuple[Node, int, Node, int]:
    """Return two nodes that talk, each with the number by which it knows the other."""
    a, b = world.node("a"), world.node("b")
    b_of_a = a.transport.connect(b.transport.address)
    world.settle(lambda: bool(a.arrived and b.arrived))
    (came,) = b.arrived
    assert isinstance(came, Came)
    assert a.arrived == [Reached(peer=b_of_a)]
    a.arrived.clear()
    b.arrived.clear()
    return a, b_of_a, b, came.peer


class World(Protocol):
    lease_s: float

    def node(self, name: str, token: str = TOKEN) -> Node: ...

    def silent_address(self) -> str:
        """Return an address from which nothing ever comes back."""
        ...

    def settle(self, is_done: Callable[[], bool]) -> None:
        """Let all nodes receive until something is so."""
        ...

    def let_arrive(self) -> None:
        """Let what was sent arrive, without anybody receiving it."""
        ...

    def end(self, node: Node) -> None:
        """End a node's process."""
        ...

    def close(self) -> None: ...


class TcpWorld:
    """Real connections on this machine."""

    def __init__(self, lease_s: float = 10.0, *, tls: bool = False) -> None:
        self.lease_s = lease_s
        self.tls = tls
        self.nodes: list[Node] = []
        self._silent = socket.create_server(("127.0.0.1", 0))

    def node(self, name: str, token: str = TOKEN, host: str = "127.0.0.1") -> Node:
        tls = derive_tls(token) if self.tls else None
        made = Node(TcpTransport(listen(host), token=token, lease_s=self.lease_s, tls=tls))
        self.nodes.append(made)
        return made

    def silent_address(self) -> str:
        return f"127.0.0.1:{self._silent.getsockname()[1]}"

    def settle(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not is_done():
            assert time.monotonic() < end_s, [each.arrived for each in self.nodes]
            self.turn(end_s)

    def turn(self, end_s: float) -> None:
        """Wait until something has come for somebody, and take it."""
        due_s = [each.transport.tick(time.monotonic()) for each in self.nodes]
        wait_s = max(0.0, min([*due_s, end_s]) - time.monotonic())
        select.select([each.transport for each in self.nodes], [], [], wait_s)
        for each in self.nodes:
            each.arrived += each.transport.receive()

    def let_arrive(self) -> None:
        """Nothing is to be done: on this machine it is there as soon as it was sent."""

    def end(self, node: Node) -> None:
        node.transport.close()
        self.nodes.remove(node)

    def close(self) -> None:
        self._silent.close()
        for each in self.nodes:
            each.transport.close()


class MemoryWorld:
    """A simulated network."""

    def __init__(self, seed: int = 7, lease_s: float = 10.0) -> None:
        self.lease_s = lease_s
        self.network = Network(seed, lease_s=lease_s)
        self.nodes: dict[str, Node] = {}

    def node(self, name: str, token: str = TOKEN) -> Node:
        self.nodes[name] = Node(self.network.node(name, token))
        return self.nodes[name]

    def silent_address(self) -> str:
        self.network.node("silent")
        self.network.cut({"silent"}, self.nodes, is_silent=True)
        return "silent:1"

    def settle(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            due_s = [each.transport.tick(self.network.now_s) for each in self.nodes.values()]
            self.run_until(min([*due_s, self.network.next_s()]))

    def run_until(self, now_s: float) -> None:
        """Move the time on, and have the nodes take what has come by then."""
        assert now_s < math.inf, (self.network, [each.arrived for each in self.nodes.values()])
        while self.network.next_s() <= now_s:
            self.network.advance(max(self.network.now_s, self.network.next_s()))
            for name in self.network.ready():
                self.nodes[name].arrived += self.nodes[name].transport.receive()
        self.network.advance(now_s)

    def let_arrive(self) -> None:
        self.network.advance(self.network.now_s + 1)

    def end(self, node: Node) -> None:
        node.transport.close()
        self.nodes = {name: each for name, each in self.nodes.items() if each is not node}

    def close(self) -> None:
        for each in self.nodes.values():
            each.transport.close()
