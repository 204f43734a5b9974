"""Events of membership, and the actions that decisions about them bring about. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilience.agent.connections.transport import Arrival
from resilience.agent.coordination.founding import Record
from resilience.comm.messages import Join, Message
from resilience.state.layout import Layout

Ended = frozenset[tuple[str, str]]
"""Which agents have ended for certain, each with its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """An agent has come; its workers are warm."""

    join: Join


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """An agent has said goodbye, or is silent."""

    node: str
    is_dead: bool
    """Whether it has ended for certain; one that is only silent may live on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnded:
    """There is evidence that a silent agent has ended, and all its workers."""

    node: str
    starts: frozenset[str]
    """Of these starts of the agent."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Who has the record of a generation's number."""

    generation: int
    layout: Layout | None
    """None where the folder did not say."""
    reason: str = ""
    """Why it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Whether agents that have just come may begin the run."""

    record: Record | None
    """Under which they do; None where they may not."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The content of the run's record, which all agents of the run keep."""

    generation: int
    """The newest that was opened."""
    starts: Mapping[str, str] = field(default_factory=dict)
    """Which start of each agent its coordinators have heard of last."""
    gone: frozenset[str] = frozenset()
    """Agents of which that start has ended for certain."""
    after: Ended | None = None
    """The end of an agent that was known when the record was asked for."""
    is_over: bool = False
    """The run has ended in order, with a status."""
    status: int = 0

    @classmethod
    def read(cls, record: Record, after: Ended) -> Recorded:
        """Return what a record says, asked for once this end was known."""
        return cls(
            generation=record.generation,
            starts=dict(record.starts),
            gone=frozenset(record.gone),
            after=after,
            is_over=record.is_over,
            status=record.status,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A member's agent passed something on."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""


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


Event = NodeJoined | NodeLost | NodeEnded | Claimed | Judged | Recorded | Said | Tick
"""About which the coordinator decides."""
Heeded = Arrival | Dialed | Looked | Moved | Settled | HandedOver
"""About which an agent decides that is among the others."""


# ---- actions

_WORDS = {
    "warning": "{text}",
    "node_lost": "node {node} is silent",
    "node_left": "node {node} has left",
    "node_awaited": "waits {seconds:g} s at most for {reason}",
    "coordinator_replaced": "coordinates now, since node {lost} is not heard",
    "node_ended": "node {node} has ended: {reason}",
}
"""Of notes, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Tell a node's agent something."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write an event."""

    event: str
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Return what a person who looks after the run is told of it, empty where nothing is."""
        key = "node_left" if self.fields.get("is_dead") else self.event
        return _WORDS.get(key, "").format(**self.fields)


def warn(text: str) -> Note:
    """Write a warning, and tell the person who looks after the run."""
    return Note(event="warning", fields={"text": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    """Try to write the record of a generation's number, which whoever is first has for ever."""

    generation: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """Try to begin the run with the record of its folder."""

    agents: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """Have another node coordinate: this agent's own leaves the run."""

    node: str


Action = Send | ClaimRecord | FoundRun | HandOver | Note
"""Of the coordinator."""


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


Act = Dial | Tell | HangUp | Note | Follow | JoinAgain | Lead | Resign | Event | Message
"""Of an agent: an event is for the coordinator here, a message is an order to obey."""
