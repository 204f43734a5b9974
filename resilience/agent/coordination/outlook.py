"""What an agent knows of the others, what it hears of them, and what it does. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from resilience.agent.connections.transport import Arrival
from resilience.agent.coordination.membership import Event
from resilience.comm.messages import Hello, Join, Message

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
