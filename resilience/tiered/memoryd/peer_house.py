"""What all connections between this daemon and the others share."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import Any, Protocol

from resilience.arguments import parse_endpoint
from resilience.tiered.catalog import Copy, StepAt
from resilience.tiered.errors import RefusedError
from resilience.tiered.memoryd.http_spaces import PREFIX as HTTP_PREFIX
from resilience.tiered.memoryd.http_steps import METADATA
from resilience.tiered.memoryd.peer_directory import Directory
from resilience.tiered.memoryd.peer_options import PeerSettings
from resilience.tiered.memoryd.peer_origins import Origins
from resilience.tiered.memoryd.peer_targets import Targets
from resilience.tiered.memoryd.peer_wire import VERSION, PeerSocket
from resilience.tiered.memoryd.peering import Notes
from resilience.tiered.paths import step_key
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId
from resilience.tiered.vault import Vault, Writing

CONNECT_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 10.0
ROWS_MAX = 4096
"""How many copies one frame names."""

_STATE_S = 1.0
"""How old what is told may become where nothing says that it has changed."""
_COPY_FIELDS = 9
_ID_FIELDS = 4
_STEP_FIELDS = 3
_NUMBER_MAX = (1 << 63) - 1


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
    notes: Mapping[str, Any]
    copies: Mapping[ShardId, Copy]
    jobs: Mapping[str, str]
    complete: list[list[Any]]
    """The steps that were complete here, as `write_complete` returns them."""


class Begin(Protocol):
    """Begins to write a shard, as the vault does."""

    def __call__(
        self, shard_id: ShardId, num_bytes: int, *, owner: str = "", is_copy: bool = False
    ) -> Writing:
        """Return a segment to be filled."""
        ...


@dataclass(slots=True, kw_only=True)
class PeerHouse:
    """What all connections of the door to other nodes share."""

    vault: Vault
    settings: PeerSettings
    directory: Directory
    origins: Origins
    boot: str
    """This life of this daemon."""
    begin: Begin
    client_tls: ssl.SSLContext | None = None
    server_tls: ssl.SSLContext | None = None
    on_peer: Callable[[str], None] = lambda name: None
    """Called with the name of a node whose connection has come."""
    complete: Complete = dict
    notes: Notes | None = None
    num_notes: int = 0
    """How often the notes may have changed."""
    num_told: dict[str, int] = field(default_factory=dict)
    """Up to which change each other node has heard them."""
    taken: defaultdict[str, set[ShardId]] = field(default_factory=lambda: defaultdict(set))
    """What came from each other node, which counts it as held here until it is told otherwise."""
    unreachable: set[str] = field(default_factory=set)
    """The nodes to which this one could not connect when it tried last."""
    targets: Targets = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _state: OwnState | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.targets = Targets(self.directory, self.settings)

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
        notes: Mapping[str, Any] = self.notes.tell() if self.notes else {}
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
            complete=write_complete(self.complete()),
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
            each.meta.id: Copy(
                meta_id=each.meta.id,
                num_shards=each.meta.num_shards,
                digest=each.digest,
                num_bytes=each.meta.num_bytes,
                place=self.settings.own.name,
                tier="ram",
                is_passing=self.is_passing(each.meta.id),
                is_metadata=bool(each.meta.rest.get(METADATA)),
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
        connection: socket.socket = socket.create_connection(
            parse_endpoint(node.address), timeout=CONNECT_TIMEOUT_S
        )
        try:
            if self.client_tls:
                connection.settimeout(HELLO_TIMEOUT_S)
                connection = self.client_tls.wrap_socket(connection)
            peer = PeerSocket(connection, stall_s=self.settings.gone_s)
            own = self.settings.own
            hello = {
                "op": "hello",
                "version": VERSION,
                "token": self.settings.token,
                "node": own.name,
                "domain": own.domain,
                "switch": own.switch,
                "boot": self.boot,
                "is_link": is_link,
            }
            reply = peer.ask(hello, timeout_s=HELLO_TIMEOUT_S)
            _check_name(node, reply.get("node"))
        except BaseException:
            connection.close()
            raise
        return peer


def write_copies(copies: Sequence[Copy]) -> list[list[Any]]:
    """Return copies for a frame; where they are goes without saying."""
    return [
        [
            *write_id(each.meta_id),
            each.num_shards,
            each.digest,
            each.num_bytes,
            int(each.is_passing),
            int(each.is_metadata),
        ]
        for each in copies
    ]


def read_copies(rows: object, place: str) -> list[Copy]:
    """Read them back; raises ValueError for anything else."""
    return [
        Copy(
            meta_id=read_id(row[:_ID_FIELDS]),
            num_shards=_whole(row[4]),
            digest=read_text(row[5]),
            num_bytes=_whole(row[6]),
            place=place,
            tier="ram",
            is_passing=bool(_whole(row[7])),
            is_metadata=bool(_whole(row[8])),
        )
        for row in _rows(rows, _COPY_FIELDS)
    ]


def write_id(shard_id: ShardId) -> list[Any]:
    """Return a shard's name for a frame."""
    return [shard_id.namespace, shard_id.step, shard_id.generation, shard_id.shard]


def read_ids(rows: object) -> list[ShardId]:
    """Read names of shards; raises ValueError for anything else."""
    return [read_id(row) for row in _rows(rows, _ID_FIELDS)]


def read_id(row: object) -> ShardId:
    """Read a shard's name; raises ValueError for what is none."""
    [[namespace, step, generation, shard]] = _rows([row], _ID_FIELDS)
    if not isinstance(generation, int) or isinstance(generation, bool):
        raise ValueError(f"generation {generation!r:.40} is no integer")  # noqa: TRY004
    return check_id(
        ShardId(
            namespace=read_text(namespace),
            step=_whole(step),
            generation=generation,
            shard=read_text(shard),
        )
    )


def check_id(shard_id: ShardId) -> ShardId:
    """Return a shard's name; raises ValueError where no door can have made it."""
    # The HTTP door's prefix is for the vault alone.
    step_key(replace(shard_id, namespace=shard_id.namespace.removeprefix(HTTP_PREFIX)))
    return shard_id


def write_complete(complete: Mapping[str, frozenset[StepAt]]) -> list[list[Any]]:
    """Return steps for a frame, the newest of each namespace."""
    each_max = ROWS_MAX // max(1, len(complete))
    return [
        [name, at.step, at.generation]
        for name, steps in complete.items()
        for at in nlargest(each_max, steps)
    ]


def read_complete(rows: object) -> dict[str, frozenset[StepAt]]:
    """Read them back; raises ValueError for anything else."""
    found: dict[str, set[StepAt]] = {}
    for namespace, step, generation in _rows(rows, _STEP_FIELDS):
        name = read_id([namespace, step, generation, ""])
        found.setdefault(name.namespace, set()).add(
            StepAt(step=name.step, generation=name.generation)
        )
    return {name: frozenset(steps) for name, steps in found.items()}


def read_jobs(value: object) -> Mapping[str, str]:
    """Read whose namespaces are; raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"no jobs: {value!r:.40}")  # noqa: TRY004 - a wrong value
    return {name: read_text(job) for name, job in value.items()}


def read_text(value: object) -> str:
    """Return what has to be text; raises ValueError for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")  # noqa: TRY004 - a wrong value
    return value


def _check_name(node: Node, name: object) -> None:
    if name != node.name:
        raise RefusedError(f"{node.address} is {name!r:.80}, not {node.name}")


def _rows(rows: object, num_fields: int) -> list[list[Any]]:
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == num_fields for row in rows
    ):
        raise ValueError(f"no list of shards: {rows!r:.40}")
    return rows


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _NUMBER_MAX:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value
