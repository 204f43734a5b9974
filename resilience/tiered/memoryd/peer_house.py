"""What all connections between this daemon and the others share."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from resilience.arguments import NO_NAME, parse_endpoint
from resilience.runtime.door import DAEMONS, NAME_BYTES
from resilience.runtime.server import Credentials
from resilience.tiered.catalog import Copy, StepAt
from resilience.tiered.errors import RefusedError
from resilience.tiered.memoryd.http_spaces import PREFIX as HTTP_PREFIX
from resilience.tiered.memoryd.notes import BoardNotes, NodeNotes
from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.memoryd.peer_options import PeerSettings
from resilience.tiered.memoryd.peer_origins import Origins
from resilience.tiered.memoryd.peer_targets import Targets
from resilience.tiered.memoryd.peer_wire import VERSION, PeerSocket, choose_complete
from resilience.tiered.memoryd.peering import copy_in_memory
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId
from resilience.tiered.vault import Vault, Writing

CONNECT_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 10.0

_STATE_S = 1.0
"""How old what is told may become where nothing says that it has changed."""

Begin = Callable[..., Writing]
"""Begins to write a shard, as the vault does."""
Complete = Callable[[], Mapping[str, frozenset[StepAt]]]
"""Returns by namespace the steps that this node has seen complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """What a node tells all others, as it was at one moment."""

    num_own: int
    """After how many changes of this node it was made."""
    until_s: float
    """When it is made anew, whatever has changed."""
    num_notes: int
    notes: NodeNotes | None
    copies: Mapping[ShardId, Copy]
    jobs: Mapping[str, str]
    complete: Mapping[str, Sequence[StepAt]]
    """The steps that were complete here, as `choose_complete` returns them."""


@dataclass(slots=True, kw_only=True)
class PeerHouse:
    """What all connections of the door to other nodes share."""

    vault: Vault
    settings: PeerSettings
    directory: Directory
    origins: Origins
    boot: str = field(default_factory=lambda: secrets.token_hex(NAME_BYTES // 2))
    """This life of this daemon."""
    begin: Begin
    on_peer: Callable[[str], None] = lambda name: None
    """Called with the name of a node whose connection has come."""
    on_stranger: Callable[[Node], None] = lambda node: None
    """Called with a node that has the token, says where it listens, and was not known before."""
    complete: Complete = dict
    notes: BoardNotes | None = None
    num_notes: int = 0
    """How often the notes may have changed."""
    num_told: dict[str, int] = field(default_factory=dict)
    """Up to which change each other node has heard them."""
    taken: defaultdict[str, set[ShardId]] = field(default_factory=lambda: defaultdict(set))
    """What came from each other node, which counts it as held here until it is told otherwise."""
    unreachable: set[str] = field(default_factory=set)
    """The nodes to which this one could not connect when it tried last."""
    nameless: dict[str, float] = field(default_factory=dict)
    """Addresses whose names did not resolve at the last try, and since when."""
    targets: Targets = field(init=False)
    credentials: Credentials = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _state: OwnState | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.targets = Targets(self.directory, self.settings)
        self.credentials = Credentials(
            kind=DAEMONS,
            token=self.settings.token,
            tls=self.settings.tls,
            name=self.boot.encode(),
        )

    def own_state(self) -> OwnState:
        """Return what the others are to know; made once for all links after each change."""
        with self._lock:
            before, num_own = self._state, self.directory.own_changes[0]
            if before and before.num_own == num_own and time.monotonic() < before.until_s:
                return before
            self._state = self._make_state(before, num_own)
            return self._state

    def _make_state(self, before: OwnState | None, num_own: int) -> OwnState:
        # What is no other than before is the same object, so that links see it at once.
        num_notes = self.num_notes
        notes = self.notes.tell() if self.notes else None
        known = before.copies if before else {}
        copies = {
            name: old if (old := known.get(name)) == each else each
            for name, each in self.copies().items()
        }
        if known.keys() - copies.keys():
            self.directory.forget_dropped(list(copies))
        return OwnState(
            num_own=num_own,
            until_s=time.monotonic() + _STATE_S,
            num_notes=num_notes,
            notes=before.notes if before and before.notes == notes else notes,
            copies=copies,
            jobs=self.jobs(),
            complete=choose_complete(self.complete()),
        )

    def note_taken(self, peer: str, shard_id: ShardId) -> None:
        """Take note that a node knows a shard to be held here, since it has sent it.

        It may have gone again before that node was ever told of it.
        """
        with self._lock:
            self.taken[peer].add(shard_id)
        if self.vault.find(shard_id) is None:
            self.directory.wake()

    def pop_taken(self, peer: str) -> set[ShardId]:
        """Return what was noted, once; to be called before `own_state`."""
        with self._lock:
            return self.taken.pop(peer, set())

    def jobs(self) -> dict[str, str]:
        """Return whose the namespaces are that this node holds something of."""
        names = {each.id.namespace for each in self.vault.metas()}
        jobs = {each: self.vault.job_of(each) for each in names}
        return {name: job for name, job in jobs.items() if job is not None}

    def copies(self) -> dict[ShardId, Copy]:
        """Return what this node holds."""
        return {
            each.meta.id: copy_in_memory(
                each, self.settings.own.name, is_passing=self.is_passing(each.meta.id)
            )
            for each in self.vault.holdings()
        }

    def is_passing(self, shard_id: ShardId) -> bool:
        """Return whether this node holds a shard only until others keep it instead.

        It was written here, or brought for a reader. The HTTP door's stay: it drops by rules
        of its own.
        """
        return (
            self.settings.holds_instead
            and not shard_id.namespace.startswith(HTTP_PREFIX)
            and self.origins.of(shard_id) is None
        )

    def dial(self, node: Node, *, is_link: bool) -> PeerSocket:
        """Connect to a node and say hello; raises OSError, ValueError or a TieredError."""
        try:
            passage = self.credentials.lead(
                socket.create_connection(parse_endpoint(node.address), CONNECT_TIMEOUT_S),
                connects=True,
            )
        except socket.gaierror as error:
            self.nameless.setdefault(node.address, time.monotonic())
            raise OSError(f"{node.address}: {NO_NAME}: {error.strerror}") from error
        self.nameless.pop(node.address, None)
        try:
            connection = passage.go_through(HELLO_TIMEOUT_S)
            peer = PeerSocket(connection, stall_s=self.settings.gone_s)
            hello = {
                "op": "hello",
                "version": VERSION,
                "node": self.settings.own,
                "boot": self.boot,
                "is_link": is_link,
            }
            _check_name(node, peer.ask(hello, timeout_s=HELLO_TIMEOUT_S).get("node"))
        except BaseException:
            passage.socket.close()
            raise
        return peer


def _check_name(node: Node, name: object) -> None:
    if name != node.name:
        raise RefusedError(f"{node.address} is {name!r:.80}, not {node.name}")
