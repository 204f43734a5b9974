"""An agent's knowledge of the others, the events about them, and its acts. Pure data.

And what `party`, which does it, asks of the agent that it belongs to and of the run's folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from resilience.agent.connections.transport import Arrival
from resilience.agent.coordination.membership import Ended, Event, State
from resilience.comm.messages import Drain, Hello, Join, Message, StoreReply
from resilience.state.layout import Layout

SEEKING = "seeking"
FOLLOWING = "following"
LEADING = "leading"

NO_ORDER = 1 << 30
"""The order of an agent that leads only where nobody else does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A connection to another agent."""

    heard_s: float
    address: str | None = None
    """Whom this agent has called; None where the other end has."""
    join: Join | None = None
    """Who has joined over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What an agent knows of the others."""

    hello: Hello
    """What it says of itself."""
    endpoints: tuple[str, ...]
    """Where agents of the run are found before one of them is known."""
    lease_s: float
    """Who was not heard for so long is silent."""
    program: str = ""
    """What this agent's workers run, as those of all others have to."""
    stage: str = SEEKING
    lines: Mapping[int, Line] = field(default_factory=dict)
    waiting: Mapping[int, Join] = field(default_factory=dict)
    """Who would join, by connection, under a name that a silent agent may still have."""
    link: int | None = None
    """The connection to the coordinator that is followed."""
    roster: tuple[tuple[str, str], ...] = ()
    """Name and address of every agent, as the last coordinator has said."""
    known: frozenset[str] = frozenset()
    """Names of all agents that were ever in a roster: who is silent may live on elsewhere."""
    starts: Mapping[str, str] = field(default_factory=dict)
    """Which start of each was in a roster last."""
    lost: str = ""
    """Address of the coordinator that was followed last."""
    dead: frozenset[str] = frozenset()
    """Names of coordinators that have said goodbye."""
    hints: tuple[str, ...] = ()
    """Addresses at which somebody knows of a coordinator."""
    cleared: frozenset[str] = frozenset()
    """Addresses where nobody leads, or would before this agent."""
    called_s: Mapping[str, float] = field(default_factory=dict)
    """When each address was called last."""
    is_settled: bool = False
    """Whether a generation is open that this agent coordinates."""
    tick_s: float = 0.0
    beat_s: float = 0.0

    @property
    def beat_every_s(self) -> float:
        """Return the seconds between two signs of life."""
        return self.lease_s / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialed:
    """What was asked for by a Dial has a number now."""

    peer: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The agent's own part in the run has changed."""

    generation: int
    order: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A generation that this agent coordinates was opened, or is over."""

    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """This agent's node leaves the run, and another one is to coordinate."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Connect to an address."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a message."""

    peer: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class HangUp:
    """End a connection."""

    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Join the coordinator that `link` leads to."""

    start: str
    """Which start of its agent it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAgain:
    """Tell the coordinator once more what this agent has agreed to: its ballot is a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """Coordinate from here on."""

    lost: str
    """Name of the coordinator before; empty where there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resign:
    """Coordinate no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Have the coordinator here decide about an event."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Obey:
    """Do what the coordinator says that is followed."""

    message: Message


Act = Dial | Tell | HangUp | Follow | JoinAgain | Lead | Resign | Coordinate | Obey
Heeded = Arrival | Dialed | Looked | Moved | Settled | HandedOver
Result = tuple[Outlook, list[Act]]


class Owner(Protocol):
    """The agent that is among the others."""

    def hear(self, message: Message) -> None:
        """Do what the coordinator says."""

    def reply(self, reply: StoreReply) -> None:
        """Pass a reply of the store on to the worker that has called."""

    def join(self) -> None:
        """Tell a new coordinator of this node, now or once its workers are warm."""

    def drain(self, order: Drain) -> str:
        """Have this node leave the run, if it is the one that is meant; returns why it stays."""

    def make_state(self, lost: str, dead: frozenset[str], known: frozenset[str]) -> State:
        """Return what a coordinator here would begin with, as the successor of `lost`."""


class Records(Protocol):
    """The folder of the run, as far as agents tell each other something by it."""

    def look(self, start: str) -> None:
        """Find out whether the agent of this start sees the same folder."""

    def found(self, agents: tuple[str, ...]) -> None:
        """Try to begin the run with these agents; `Judged` follows, when the disk answers."""

    def renew(
        self,
        agents: tuple[str, ...],
        generation: int,
        *,
        starts: Mapping[str, str],
        here: Collection[str],
        gone: Collection[str],
        is_over: bool,
        status: int,
    ) -> None:
        """Tell who belongs to the run, which generation it has come to, and how it has ended."""

    def read_record(self, after: Ended) -> None:
        """Ask how far the run has come, and whether it has ended; `Recorded` follows."""

    def claim(self, generation: int, layout: Layout) -> None:
        """Ask for the record of a generation's number; `Claimed` follows, when the disk answers."""


def make_outlook(
    *,
    run: str,
    node: str,
    address: str,
    start: str,
    endpoints: tuple[str, ...],
    lease_s: float,
    now_s: float,
    program: str = "",
) -> Outlook:
    """Return what an agent knows that has just come."""
    order = NO_ORDER + (endpoints.index(address) if address in endpoints else len(endpoints))
    hello = Hello(run=run, node=node, address=address, start=start, order=order)
    return Outlook(hello=hello, endpoints=endpoints, lease_s=lease_s, tick_s=now_s, program=program)
