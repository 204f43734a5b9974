"""An agent's knowledge of the others, the events about them, and its acts. Pure data.

And what `membership`, which does it, asks of the agent that it belongs to and of the run's folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from resilience.agent.coordination.events import Act, Ended
from resilience.agent.coordination.membership import State
from resilience.comm.messages import Beat, Drain, Hello, Join, Message, StoreReply
from resilience.state.layout import Layout


class Role(Enum):
    """Part of an agent among the others."""

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
class MembershipView:
    """What an agent knows of the others."""

    hello: Hello
    """What it says of itself."""
    endpoints: tuple[str, ...]
    """Where agents of the run are found before one of them is known."""
    lease_s: float
    """Who was not heard for so long is silent."""
    program: str = ""
    """What this agent's workers run, as those of all others have to."""
    role: Role = Role.SEEKING
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

    def with_roster(self, roster: Beat, known: Collection[str] = ()) -> MembershipView:
        """Return the view with a roster noted, and with these names besides."""
        names = [name for name, _ in roster.nodes]
        return replace(
            self,
            roster=roster.nodes or self.roster,
            known=self.known.union(names, known),
            starts={**self.starts, **dict(zip(names, roster.starts, strict=False))},
        )


Result = tuple[MembershipView, list[Act]]


class Owner(Protocol):
    """The agent that is among the others."""

    def obey(self, message: Message) -> None:
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

    def renew(self, state: State, *, is_over: bool) -> None:
        """Tell who belongs to the run, which generation it has come to, and how it has ended."""

    def read_record(self, after: Ended) -> None:
        """Ask how far the run has come, and whether it has ended; `Recorded` follows."""

    def claim(self, generation: int, layout: Layout) -> None:
        """Ask for the record of a generation's number; `Claimed` follows, when the disk answers."""


def make_roster(view: MembershipView, state: State) -> Beat:
    """Return the agents at hand in the order of succession, as this coordinator tells them."""
    hello = view.hello
    own = {hello.node: (hello.address, hello.start)}
    here = {join.node: (join.address, join.start) for join in state.present.values()} | own
    places = state.layout.nodes if state.layout else ()
    order = [*(node for node in places if node in here), *sorted(here)]
    names = tuple(dict.fromkeys(order))
    return Beat(
        nodes=tuple((node, here[node][0]) for node in names),
        starts=tuple(here[node][1] for node in names),
        ballot=hello.ballot,
    )


def find_endpoint_order(address: str, endpoints: tuple[str, ...]) -> int:
    """Return the order of an agent that is no member: endpoints come first."""
    return NO_ORDER + (endpoints.index(address) if address in endpoints else len(endpoints))
