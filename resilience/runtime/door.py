"""The door of agents and of daemons: both ends prove that they know the run's token. Pure.

    connector                           acceptor
    magic name nonce              ->
                                  <-    magic name nonce proof("acceptor")
    proof("connector")            ->

A proof is an HMAC-SHA256 of its sender's role and of both first lines. Its key is derived from the
token for each kind of door.

- Nonces are drawn anew for each connection: a proof that was overheard opens no other one.
- Roles differ: a proof of one side is none of the other side.
- Kinds differ: a proof for a daemon opens no agent.
- A process refuses its own name: it cannot be made to answer its own challenge.

The door neither signs nor encrypts the bytes behind it: without TLS, a host that can change packets
between two members is not kept out. TLS comes behind the door, so no stranger has a process compute
its handshake, and it carries a word that both ends derive from this door alone. Without a token
every process that reaches the port passes.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
from collections import Counter
from dataclasses import dataclass, replace

NAME_BYTES = 16
"""Drawn once by each process."""
NONCE_BYTES = 32
"""Drawn for each connection."""
PROOF_S = 5.0
"""How long a connection may take to prove the token, the handshake of TLS included."""
PLACES_MAX = 256
ORIGIN_PLACES_MAX = 64
"""So many connections may be about to prove it, and so many of one host."""
_MAGIC_BYTES = 8
_HELLO_BYTES = _MAGIC_BYTES + NAME_BYTES + NONCE_BYTES
_PROOF_BYTES = 32
_TLS_OR_NOT = bytes.maketrans(b" +", b"+ ")
_ALIKE = "set cluster.tls (--tls) on all nodes alike"
SPEAKS_TLS = f"the other end speaks TLS, and this one does not; {_ALIKE}"
SPEAKS_PLAIN = f"the other end does not speak TLS, and this one does; {_ALIKE}"
_IPV6_PREFIX = 64
"""Of IPv6 one host has all addresses with one prefix of so many bits."""


@dataclass(frozen=True, slots=True)
class DoorKind:
    """The kind of members that meet at a door, and the problems of other ends."""

    member: str
    magic: bytes
    """The first 8 bytes of either end: the members' name, a blank or `+` for TLS, and the version
    of the protocol."""

    def over_tls(self) -> DoorKind:
        """Return the kind of a door that has TLS behind it."""
        return replace(self, magic=self.magic.replace(b" ", b"+"))

    def explain_magic(self, magic: bytes) -> str:
        """Return the problem with an end that says these first bytes."""
        if self.magic.translate(_TLS_OR_NOT).startswith(magic):
            return SPEAKS_TLS if b" " in self.magic else SPEAKS_PLAIN
        return self.foreign

    @property
    def foreign(self) -> str:
        """Return the problem with an end that says something else."""
        return f"something else than {self.member} of this version is there"

    @property
    def unproven(self) -> str:
        """Return the problem with an end whose proof is wrong."""
        return (
            f"{self.member} that does not know the run's token is there; all need one --token-file"
        )

    @property
    def lasting(self) -> tuple[str, ...]:
        """Return the problems that another try does not mend."""
        return (self.foreign, self.unproven, SPEAKS_TLS, SPEAKS_PLAIN)

    @functools.cache  # noqa: B019 - a process has one token
    def derive_key(self, token: str) -> bytes:
        """Return the key of proofs: HKDF with SHA-256 (RFC 5869), one block, without a salt."""
        secret = hmac.digest(bytes(_PROOF_BYTES), token.encode(), "sha256")
        return hmac.digest(secret, self.magic + b"\x01", "sha256")


AGENTS = DoorKind("an agent", b"agents 2")
DAEMONS = DoorKind("a checkpoint daemon", b"daemon 2")


class DoorError(ValueError):
    """The other end does not pass; the message says why."""

    def __init__(self, problem: str, answer: bytes = b"") -> None:
        super().__init__(problem)
        self.answer = answer
        """Bytes to send before the connection ends: they name this side's version."""


class Door:
    """One connection's way through: the bytes that come, and the bytes that answer them."""

    def __init__(
        self, kind: DoorKind, token: str, *, name: bytes, nonce: bytes, connects: bool
    ) -> None:
        self.kind = kind
        self._key = kind.derive_key(token)
        self._name = name
        self._hello = kind.magic + name + nonce
        self.connects = connects
        self._heard = b""
        self._num_needed = _HELLO_BYTES + (_PROOF_BYTES if connects else 0)
        self.is_passed = False
        self.word = ""
        """Names this connection, once it has passed; only its two ends can compute it."""

    @property
    def opening(self) -> bytes:
        """Return what this side says unasked."""
        return self._hello if self.connects else b""

    @property
    def num_wanted(self) -> int:
        """Return how many bytes may be read; what comes after them is a message's."""
        return self._num_needed - len(self._heard)

    def feed(self, data: bytes) -> bytes:
        """Take in at most `num_wanted` bytes, and return the answer; raises DoorError."""
        self._heard += data
        magic = self._heard[:_MAGIC_BYTES]
        if not self.kind.magic.startswith(magic):
            problem = self.kind.explain_magic(magic)
            raise DoorError(problem, b"" if self.connects else self._hello)
        if self._heard.startswith(self._name, _MAGIC_BYTES):
            raise DoorError("this process itself is there")
        if self.num_wanted:
            return b""
        hello, proof = self._heard[:_HELLO_BYTES], self._heard[_HELLO_BYTES:]
        if not proof:
            self._num_needed += _PROOF_BYTES
            return self._hello + self._prove(b"acceptor", hello)
        role = b"acceptor" if self.connects else b"connector"
        if not hmac.compare_digest(proof, self._prove(role, hello)):
            raise DoorError(self.kind.unproven)
        self.is_passed = True
        self.word = self._prove(b"word", hello)[:NAME_BYTES].hex()
        return self._prove(b"connector", hello) if self.connects else b""

    def _prove(self, role: bytes, other: bytes) -> bytes:
        hellos = self._hello + other if self.connects else other + self._hello
        return hmac.digest(self._key, role + hellos, "sha256")


class Strangers:
    """The places of those who have come and not passed yet, counted by origin.

    A newcomer always gets one. The connection that has waited longest gives it up: of the
    newcomer's own origin, where that has its share, else of the origin that has most. A member
    passes within two ways of a packet, so it seldom waits longest.
    """

    def __init__(
        self, places_max: int = PLACES_MAX, origin_places_max: int = ORIGIN_PLACES_MAX
    ) -> None:
        self._places_max = places_max
        self._origin_places_max = origin_places_max
        self._origins: dict[int, str] = {}
        """By peer, the one that has waited longest first."""
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, peer: int, host: str) -> int | None:
        """Give a peer a place, and return the one that has to go for it."""
        origin = find_origin(host)
        self._origins[peer] = origin
        self._counts[origin] += 1
        if self._counts[origin] > self._origin_places_max:
            return self.oldest(origin)
        if len(self._origins) <= self._places_max:
            return None
        return self.oldest(max(self._counts, key=self._counts.__getitem__))

    def remove(self, peer: int) -> None:
        """Take a peer's place back, if it has one."""
        if origin := self._origins.pop(peer, None):
            self._counts[origin] -= 1
            self._counts += Counter()  # which drops what is 0

    def oldest(self, origin: str | None = None) -> int:
        """Return who has waited longest, of one origin or of all."""
        return next(peer for peer, its in self._origins.items() if origin in (None, its))


@functools.lru_cache
def find_origin(host: str) -> str:
    """Return by what the places of a numeric address are counted."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
