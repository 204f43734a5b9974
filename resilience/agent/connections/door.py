"""The door of an agent: nobody without the run's token says a message. Pure.

    who connects                        who is connected to
    MAGIC name nonce              ->
                                  <-    MAGIC name nonce proof("acceptor")
    proof("connector")            ->

A proof is the HMAC-SHA256 under the token of its sender's role and of both first lines.

- Nonces are drawn anew for each connection: what was overheard opens nothing a second time.
- Roles differ: what one side has proved is no proof of the other side.
- A process refuses its own name: it cannot be made to answer its own challenge.

What follows is neither signed nor encrypted: whoever can change packets between two agents is not
kept out. Without a token the key is empty, and everybody who reaches the port passes.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections import Counter

NAME_BYTES = 16
"""Drawn once by each process."""
NONCE_BYTES = 32
"""Drawn for each connection."""
_MAGIC = b"agents 1"
_HELLO_BYTES = len(_MAGIC) + NAME_BYTES + NONCE_BYTES
_PROOF_BYTES = 32
_IPV6_PREFIX = 64
"""Of IPv6 one host has all addresses with one prefix of so many bits."""


NO_AGENT = "something else than an agent of this version is there"
NO_TOKEN = "an agent that does not know the run's token is there; all need one --token-file"
"""What keeps two agents apart until a person mends it."""


class DoorError(ValueError):
    """The other end does not come in; the message says why."""


class Door:
    """One connection's way through: the bytes that come, and the bytes that answer them."""

    def __init__(self, token: str, *, name: bytes, nonce: bytes, connects: bool) -> None:
        self._token = token.encode()
        self._name = name
        self._hello = _MAGIC + name + nonce
        self._connects = connects
        self._heard = b""
        self._num_needed = _HELLO_BYTES + (_PROOF_BYTES if connects else 0)
        self.is_passed = False

    @property
    def opening(self) -> bytes:
        """Return what this side says unasked."""
        return self._hello if self._connects else b""

    @property
    def num_wanted(self) -> int:
        """Return how many bytes may be read; what comes after them is a message's."""
        return self._num_needed - len(self._heard)

    def feed(self, data: bytes) -> bytes:
        """Take in at most `num_wanted` bytes, and return the answer; raises DoorError."""
        self._heard += data
        if not _MAGIC.startswith(self._heard[: len(_MAGIC)]):
            raise DoorError(NO_AGENT)
        if self._heard.startswith(self._name, len(_MAGIC)):
            raise DoorError("this agent itself is there")
        if self.num_wanted:
            return b""
        hello, proof = self._heard[:_HELLO_BYTES], self._heard[_HELLO_BYTES:]
        if not proof:
            self._num_needed += _PROOF_BYTES
            return self._hello + self._prove(b"acceptor", hello)
        role = b"acceptor" if self._connects else b"connector"
        if not hmac.compare_digest(proof, self._prove(role, hello)):
            raise DoorError(NO_TOKEN)
        self.is_passed = True
        return self._prove(b"connector", hello) if self._connects else b""

    def _prove(self, role: bytes, other: bytes) -> bytes:
        hellos = self._hello + other if self._connects else other + self._hello
        return hmac.digest(self._token, role + hellos, "sha256")


class Strangers:
    """The places of those who have come and not passed yet, counted by origin.

    A newcomer always gets one. Whoever has waited longest gives it up: of the newcomer's own
    origin, where that has its share, else of the origin that has most. An agent passes within two
    ways of a packet, so it seldom waits longest.
    """

    def __init__(self, places_max: int, origin_places_max: int) -> None:
        self._places_max = places_max
        self._origin_places_max = origin_places_max
        self._origins: dict[int, str] = {}
        """By peer, the one that has waited longest first."""

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, peer: int, host: str) -> int | None:
        """Give a peer a place, and return the one that has to go for it."""
        origin = find_origin(host)
        self._origins[peer] = origin
        ((most, _),) = Counter(self._origins.values()).most_common(1)
        if sum(each == origin for each in self._origins.values()) > self._origin_places_max:
            return self.oldest(origin)
        return self.oldest(most) if len(self._origins) > self._places_max else None

    def remove(self, peer: int) -> None:
        """Take a peer's place back, if it has one."""
        self._origins.pop(peer, None)

    def oldest(self, origin: str | None = None) -> int:
        """Return who has waited longest, of one origin or of all."""
        return next(peer for peer, its in self._origins.items() if origin in (None, its))


def find_origin(host: str) -> str:
    """Return by what the places of a numeric address are counted."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
