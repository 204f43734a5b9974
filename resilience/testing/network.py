"""Agents' connections in memory, over a network whose time and troubles a test decides.

Stands beside `TcpTransport`. Nothing happens by itself: a test moves the time on, and has each node
that is awake receive. A host that is lost is one that is cut off silently and then killed. What is
not here: queues that become too long, and strangers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

from resilience.agent.connections.transport import Arrival, Came, Gone, Heard, Reached
from resilience.comm.messages import Message, Open, Stopped, decode, encode
from resilience.runtime.door import AGENTS

_PORT = 1
_PROBE_S = 1.0
"""One end of a connection that is cut silently gives it up at most this much after `lease_s`."""


class _Packet(Enum):
    KNOCK = "knock"
    WELCOME = "welcome"
    PROOF = "proof"
    END = "it has ended the connection"
    RESET = "the connection was reset"
    REFUSED = "nobody listens there"


@dataclass(slots=True, eq=False)
class _End:
    """One end of a connection."""

    owner: SimulatedTransport
    peer: int
    far: str
    """The node at the other end."""
    connects: bool
    deadline_s: float = math.inf
    """When one that connects gives up."""
    other: _End | None = None
    is_open: bool = False
    """It has passed the door."""
    waiting: list[Message] = field(default_factory=list)
    """What its owner has said before that."""
    arriving: deque[tuple[float, _Packet | Message]] = field(default_factory=deque)
    held: list[_Packet | Message] = field(default_factory=list)
    """What was sent to this end over a path that is cut silently."""
    lost_s: float = math.inf
    """When this end gives up such a path."""

    def next_s(self) -> float:
        """Return when this end has something for its owner."""
        return min(self.arriving[0][0], self.lost_s) if self.arriving else self.lost_s

    def reset(self, now_s: float) -> None:
        """End it with all that has not arrived by now."""
        arrived = [each for each in self.arriving if each[0] <= now_s]
        self.arriving = deque([*arrived, (now_s, _Packet.RESET)])
        self.held.clear()
        self.owner.note_change()


class Network:
    """The nodes of one test and what is between them; the same for the same seed and calls.

    A packet is under way for a time within `delay_s`, and one message in 1 / `loss` breaks its
    connection instead.
    """

    def __init__(
        self,
        seed: int,
        *,
        delay_s: tuple[float, float] = (0.0001, 0.001),
        loss: float = 0.0,
        lease_s: float = 3.0,
    ) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._loss = loss
        self.lease_s = lease_s
        self.now_s = 0.0
        self._nodes: dict[str, SimulatedTransport] = {}
        self._cuts: dict[frozenset[str], bool] = {}
        """By the two nodes, whether it is a silent one."""
        self._paused_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"Network(seed={self._seed}, now_s={self.now_s:g})"

    def node(self, name: str, token: str = "") -> SimulatedTransport:
        """Return the transport of a process that starts on a node, which has no living one."""
        assert name not in self._nodes, f"{name} is there already"
        self._nodes[name] = SimulatedTransport(self, name, token)
        return self._nodes[name]

    # ---- time

    def next_s(self) -> float:
        """Return when an awake node has something to receive, inf where that is never."""
        return min([each.next_s() for each in self._awake()], default=math.inf)

    def advance(self, now_s: float) -> None:
        """Move the time on; nobody receives anything by that alone."""
        assert now_s >= self.now_s, f"{now_s} is before {self.now_s}"
        self.now_s = now_s

    def ready(self) -> list[str]:
        """Return the awake nodes that have something to receive by now."""
        return [each.name for each in self._awake() if each.next_s() <= self.now_s]

    # ---- troubles

    def cut(self, some: Collection[str], others: Collection[str], *, is_silent: bool) -> None:
        """Let nothing pass between two sets of nodes.

        Silently: nobody is told, what is sent waits for `heal`, and a connection ends some time
        after `lease_s`. Else connections end at once, and new ones are refused.
        """
        for pair in _pairs(some, others):
            self._cuts[pair] = is_silent
        for end in self._ends_between(some, others):
            if not is_silent:
                end.reset(self.now_s)
                continue
            end.held += [packet for due_s, packet in end.arriving if due_s > self.now_s]
            end.arriving = deque(each for each in end.arriving if each[0] <= self.now_s)
            end.lost_s = self.now_s + self.lease_s + self._random.uniform(0, _PROBE_S)
            end.owner.note_change()

    def heal(self, some: Collection[str], others: Collection[str]) -> None:
        """Let pass again what was cut; what was sent over a connection that lives on arrives."""
        for pair in _pairs(some, others):
            self._cuts.pop(pair, None)
        for end in self._ends_between(some, others):
            held, end.held, end.lost_s = end.held, [], math.inf
            end.owner.note_change()
            for packet in held:
                self.post(end, packet)
            if end.other is None:
                self.open_path(end)
            elif not end.other.owner.has(end.other):
                self.post(end, _Packet.RESET)

    def reset(self, some: Collection[str], others: Collection[str]) -> None:
        """End all connections between two sets of nodes, with all that is on its way."""
        for end in self._ends_between(some, others):
            end.reset(self.now_s)

    def pause(self, name: str) -> None:
        """Have a node's process stand still; what is sent to it waits there."""
        self._paused_s[name] = self.now_s

    def resume(self, name: str) -> None:
        """Have a node's process go on."""
        self._nodes[name].put_off(self.now_s - self._paused_s.pop(name))

    def kill(self, name: str) -> None:
        """End a node's process; the others hear of it where a way leads to them."""
        self._paused_s.pop(name, None)
        self._nodes[name].close()

    # ---- for its transports

    def open_path(self, end: _End) -> None:
        """Send the first packet of a connection, which may find nobody, or wait for `heal`."""
        is_silent, target = self._cuts.get(_pair(end)), self._nodes.get(end.far)
        if is_silent:
            return
        if target is None or is_silent is False:
            self.post(end, _Packet.REFUSED)
            return
        end.other = target.add(end.owner.name, connects=False, other=end)
        self.post(end.other, _Packet.KNOCK)

    def post(self, end: _End, packet: _Packet | Message) -> None:
        """Send something to one end of a connection."""
        if self._cuts.get(_pair(end)):
            end.held.append(packet)
        elif isinstance(packet, Message) and self._random.random() < self._loss:
            end.reset(self.now_s)
            if end.other is not None:
                end.other.reset(self.now_s)
        else:
            due_s = self.now_s + self._random.uniform(*self._delay_s)
            before_s = end.arriving[-1][0] if end.arriving else due_s
            end.arriving.append((max(due_s, before_s), packet))
            end.owner.note_change()

    def forget(self, name: str) -> None:
        """Take the transport of a process that has ended out of the network."""
        self._nodes.pop(name, None)

    def _awake(self) -> list[SimulatedTransport]:
        return [each for name, each in self._nodes.items() if name not in self._paused_s]

    def _ends_between(self, some: Collection[str], others: Collection[str]) -> list[_End]:
        pairs = set(_pairs(some, others))
        ends = itertools.chain.from_iterable(each.ends() for each in self._nodes.values())
        return [end for end in ends if _pair(end) in pairs]


class SimulatedTransport:
    """One process's transport on a simulated network; see `Transport`."""

    def __init__(self, network: Network, name: str, token: str) -> None:
        self.name = name
        self.token = token
        self._network = network
        self._numbers = itertools.count(1)
        self._ends: dict[int, _End] = {}
        self._inbox: list[Arrival] = []
        self._next_s: float | None = None
        """When the next of the ends has something; None where that has to be looked for."""

    @property
    def address(self) -> str:
        """Return HOST:PORT at which other agents reach this one."""
        return f"{self.name}:{_PORT}"

    def fileno(self) -> int:
        """Return no descriptor: `Network.ready` says who has something to receive."""
        return -1

    def connect(self, address: str) -> int:
        """Begin to connect to HOST:PORT, and return the peer's number."""
        end = self.add(address.rpartition(":")[0], connects=True)
        if ":" not in address:
            self._lose(end, f"{address!r} is not HOST:PORT")
        elif address == self.address:
            self._lose(end, "this agent itself is there")
        else:
            self._network.open_path(end)
        return end.peer

    def send(self, peer: int, message: Message) -> None:
        """Say something to a peer, or to nobody where it is gone."""
        end = self._ends.get(peer)
        if end is None:
            return
        said = _as_heard(message)
        if end.is_open:
            self._post(end, said)
        else:
            end.waiting.append(said)

    def hang_up(self, peer: int) -> None:
        """End a connection; nothing of the peer comes any more, `Gone` neither."""
        end = self._ends.pop(peer, None)
        self.note_change()
        if end is not None:
            self._post(end, _Packet.END)
        self._inbox = [each for each in self._inbox if each.peer != peer]

    def receive(self) -> list[Arrival]:
        """Return what has come since the last call, each peer's in its order."""
        while self._next_end_s() <= self._network.now_s:
            end = min(self._ends.values(), key=_End.next_s)
            self.note_change()
            if end.lost_s < (end.arriving[0][0] if end.arriving else math.inf):
                self._lose(end, "it does not answer")
            else:
                self._take(end, end.arriving.popleft()[1])
        came, self._inbox = self._inbox, []
        return came

    def tick(self, now_s: float) -> float:
        """End what is overdue; returns the time of the next deadline, inf where there is none."""
        self._inbox = self.receive()
        for end in self.ends():
            if end.deadline_s <= now_s:
                self._lose(end, "it does not answer")
        return min((end.deadline_s for end in self.ends()), default=math.inf)

    def close(self) -> None:
        """End all connections, as `hang_up` does, and take no more."""
        for peer in list(self._ends):
            self.hang_up(peer)
        self._network.forget(self.name)

    # ---- for the network

    def ends(self) -> list[_End]:
        """Return this transport's ends of its connections."""
        return list(self._ends.values())

    def has(self, end: _End) -> bool:
        """Return whether a connection lives on at this end."""
        return self._ends.get(end.peer) is end

    def next_s(self) -> float:
        """Return when there is something to receive."""
        return self._network.now_s if self._inbox else self._next_end_s()

    def note_change(self) -> None:
        """Take note that another end may be the next one that has something."""
        self._next_s = None

    def put_off(self, late_s: float) -> None:
        """Give those that are being connected to the time for which this process stood still."""
        for end in self.ends():
            end.deadline_s += late_s

    def add(self, far: str, *, connects: bool, other: _End | None = None) -> _End:
        """Return a new end of a connection."""
        deadline_s = self._network.now_s + self._network.lease_s if connects else math.inf
        end = _End(self, next(self._numbers), far, connects, deadline_s, other)
        self._ends[end.peer] = end
        return end

    # ---- a connection's life

    def _next_end_s(self) -> float:
        if self._next_s is None:
            self._next_s = min([end.next_s() for end in self._ends.values()], default=math.inf)
        return self._next_s

    def _take(self, end: _End, packet: _Packet | Message) -> None:
        if isinstance(packet, Message):
            self._inbox.append(Heard(peer=end.peer, message=packet))
        elif packet is _Packet.KNOCK:
            self._post(end, _Packet.WELCOME)
        elif packet in (_Packet.WELCOME, _Packet.PROOF):
            self._open(end)
        else:
            self._lose(end, packet.value)

    def _open(self, end: _End) -> None:
        assert end.other
        if end.other.owner.token != self.token:
            self._post(end, _Packet.END)
            self._lose(end, AGENTS.unproven)
            return
        end.is_open, end.deadline_s = True, math.inf
        if end.connects:
            self._inbox.append(Reached(peer=end.peer))
            self._post(end, _Packet.PROOF)
        else:
            self._inbox.append(Came(peer=end.peer))
        for message in end.waiting:
            self._post(end, message)
        end.waiting.clear()

    def _post(self, end: _End, packet: _Packet | Message) -> None:
        if end.other is not None and end.other.owner.has(end.other):
            self._network.post(end.other, packet)

    def _lose(self, end: _End, reason: str) -> None:
        del self._ends[end.peer]
        self.note_change()
        # Nobody has been told of a stranger.
        if end.connects or end.is_open:
            self._inbox.append(Gone(peer=end.peer, reason=reason))


def _as_heard(message: Message) -> Message:
    """Return a message of its own, as it arrives over a wire."""
    if isinstance(message, Open | Stopped):
        # These hold dictionaries, which somebody could change.
        return decode(encode(message))
    return _read_back(message)


@lru_cache(maxsize=1024)
def _read_back(message: Message) -> Message:
    return decode(encode(message))


def _pair(end: _End) -> frozenset[str]:
    return frozenset({end.owner.name, end.far})


def _pairs(some: Collection[str], others: Collection[str]) -> Iterator[frozenset[str]]:
    return (frozenset(pair) for pair in itertools.product(some, others))
