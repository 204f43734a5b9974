"""The seam between agents: numbered peers that say messages to each other. Pure.

`tcp_transport` is the real one. `resilience.testing.network` has one in memory, whose time, delays
and cuts a test decides. Both pass the same suite,
`tests/resilience/agent/connections/test_transport_contract.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from resilience.comm.messages import Message

NO_AGENT = "a program there does not answer as an agent"
"""The first words of the reason for a connection that was made and did not pass the door."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """An agent has connected to this one, and has passed the door."""

    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A `connect` of this agent's has passed the door of the other one."""

    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A peer has said something."""

    peer: int
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A connection has ended, or could not be made. Comes once, and nothing of the peer after it.

    It says nothing of the agent at the other end: that one may live.
    """

    peer: int
    reason: str
    """For a person."""


Arrival: TypeAlias = Came | Reached | Heard | Gone


class Transport(Protocol):
    """The connections of one agent. For one thread, which no method ever blocks.

    A peer is one connection, whoever made it; its number is not given twice.
    """

    @property
    def address(self) -> str:
        """Return HOST:PORT at which other agents reach this one."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while `receive` has something to return."""

    def connect(self, address: str) -> int:
        """Begin to connect to HOST:PORT, and return the peer's number.

        `Reached` or `Gone` follows, the latter after `lease_s` at the latest.
        """

    def send(self, peer: int, message: Message) -> None:
        """Say something to a peer, or to nobody where it is gone.

        What is said before `Reached` waits for it. A peer that takes nothing for `lease_s`, or for
        which too much waits, is `Gone`. Replies of the store wait apart: they have no place in an
        order, and there are at most as many as calls.
        """

    def hang_up(self, peer: int) -> None:
        """End a connection; nothing of the peer comes any more, `Gone` neither.

        What was said before still leaves, as far as the other end takes it at once.
        """

    def receive(self) -> list[Arrival]:
        """Return what has come since the last call, each peer's in its order."""

    def tick(self, now_s: float) -> float:
        """End what is overdue; returns the time of the next deadline, inf where there is none.

        To be called before each wait, with `time.monotonic()`. What has arrived is read before
        anything is judged, and a deadline that passed while this process stood still is put off.
        """

    def close(self) -> None:
        """End all connections, as `hang_up` does, and take no more."""
