"""The namespaces of the HTTP door, and what they hold in the vault.

A namespace is a name, a number of ranks and a number of steps to keep. They are kept in
one file beside the segments, so that a daemon that is started again knows them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from resilience.runtime.http_messages import HttpError, retry_later
from resilience.runtime.records import from_json, read_record, to_json
from resilience.tiered.catalog import Copy, Number
from resilience.tiered.errors import RefusedError
from resilience.tiered.memoryd.http_routes import MAX_RANKS, MAX_STEPS, NAMESPACE, STEPS_RETAINED
from resilience.tiered.memoryd.http_steps import (
    METADATA,
    Steps,
    choose_generation,
    choose_shard,
    complete_steps,
    find_safe,
    plan_drops,
    plan_room,
    shards_of,
    sort_steps,
)
from resilience.tiered.memoryd.output import complain
from resilience.tiered.memoryd.peering import Peers
from resilience.tiered.namespaces import Claim
from resilience.tiered.shard import ShardId, ShardMeta
from resilience.tiered.vault import Vault

PREFIX = "http:"
"""Before the name that a namespace of this door has in the vault. Its steps are kept and
dropped by this door alone."""

_FILE = "http-namespaces.json"
_TOLD_WITHIN_S = 5.0
_ASKED_WITHIN_S = 1.0
"""Who only asks for a namespace is about to make it: that is not to take long."""
"""How long a namespace may take from the node where it was made to the others."""
_ENDED_MAX = 1024
_JOB = "http"
Numbers = tuple[Number, Number, Number]


@dataclass(slots=True, eq=False)
class Space:
    """One namespace."""

    name: str
    num_ranks: int
    steps_retained: int
    claim: Claim
    generation: int = 0
    """The newest that was ever written under."""
    changed_ns: int = 0
    """When it was made or changed: what was said of it before counts no more."""

    @property
    def numbers(self) -> Numbers:
        """Return its ranks, how many steps it keeps, and when it was made or changed."""
        return self.num_ranks, self.steps_retained, self.changed_ns

    @property
    def vault_name(self) -> str:
        """Return its name in the vault."""
        return PREFIX + self.name

    def choose_id(
        self, steps: Steps, rank: int, step: int, shard_meta: str, num_bytes: int
    ) -> ShardId | None:
        """Return the name under which a shard is written; None where the same is held already."""
        # A node that is new writes under the generation that the others are at.
        self.generation = max([self.generation, *(n for each in steps.values() for n in each)])
        versions = steps.get(step)
        generation: int | None = self.generation
        if versions:
            generation = choose_generation(versions, rank, shard_meta, num_bytes)
        if generation is None:
            return None
        self.generation = max(self.generation, generation)
        return ShardId(namespace=self.vault_name, step=step, generation=generation, shard=str(rank))


class Spaces:
    """All namespaces. Thread-safe.

    They are those of all nodes, and so are their steps: what others hold counts as held. Each
    node drops what it holds itself.
    """

    def __init__(
        self,
        vault: Vault,
        folder: Path,
        *,
        num_spaces_max: int,
        peers: Peers,
        safe: Callable[[str], Collection[ShardId]],
    ) -> None:
        self._vault = vault
        self._peers = peers
        self._safe = safe
        self._ended: dict[str, int] = {}
        """When namespaces were removed that others may still tell of."""
        self._path = folder / _FILE
        self._num_spaces_max = num_spaces_max
        self._lock = threading.RLock()
        self._is_free = threading.Condition(self._lock)
        self._spaces: dict[str, Space] = {}
        self._writing: set[tuple[str, int, int]] = set()
        self._load()

    def get(self, name: str) -> Space:
        """Return a namespace; raises HttpError 404 where there is none."""
        with self._lock:
            if space := self._spaces.get(name):
                return space
        raise HttpError(HTTPStatus.NOT_FOUND, "no such namespace")

    def create(self, name: str, num_ranks: int, steps_retained: int) -> bool:
        """Make a namespace, or give one that is there these numbers; says whether it is new.

        What it holds stays. Raises HttpError: 409 where a job of another door has the name,
        507 where there are too many.
        """
        with self._lock:
            space = self._spaces.get(name)
            if space and (space.num_ranks, space.steps_retained) == (num_ranks, steps_retained):
                return False
            self._put(name, num_ranks, steps_retained, time.time_ns())
        self._peers.wake()
        return space is None

    def _put(self, name: str, num_ranks: int, steps_retained: int, changed_ns: int) -> None:
        """Make or change a namespace; the caller has the lock."""
        space = self._spaces.get(name)
        is_new = space is None
        if space is None:
            if len(self._spaces) >= self._num_spaces_max:
                raise HttpError(HTTPStatus.INSUFFICIENT_STORAGE, "too many namespaces")
            space = self._spaces[name] = self._open(name, num_ranks, steps_retained)
        before = space.numbers
        space.num_ranks, space.steps_retained = num_ranks, steps_retained
        space.changed_ns = changed_ns
        self._ended.pop(name, None)
        try:
            self._save()
        except OSError as error:
            space.num_ranks, space.steps_retained, space.changed_ns = before
            if is_new:
                self._spaces.pop(name).claim.close()
            raise HttpError(HTTPStatus.INSUFFICIENT_STORAGE, "no room for the namespace") from error

    def wait_for(self, name: str, *, is_asked: bool = False) -> None:
        """Wait some seconds until other nodes tell of a namespace that this one does not know.

        A second with `is_asked`, and none for what was removed. Raises HttpError 404 thereafter.
        """
        with self._lock:
            if name in self._spaces:
                return
        self._peers.wait_known()
        with self._is_free:
            if self._peers.living() and not (is_asked and name in self._ended):
                within_s = _ASKED_WITHIN_S if is_asked else _TOLD_WITHIN_S
                self._is_free.wait_for(lambda: name in self._spaces, within_s)
            self.get(name)

    def tell(self) -> dict[str, Numbers]:
        """Return the namespaces for other nodes; no ranks: it was removed."""
        with self._lock:
            there = {name: each.numbers for name, each in self._spaces.items()}
            return there | {name: (0, 0, changed) for name, changed in self._ended.items()}

    def hear(self, told: Mapping[str, Numbers]) -> None:
        """Take the namespaces of another node, where they are newer than what is known here."""
        with self._is_free:
            for name, (num_ranks, steps_retained, changed_ns) in told.items():
                if not NAMESPACE.match(name) or not 0 <= num_ranks <= MAX_RANKS:
                    raise ValueError(f"no namespace: {name!r:.80} of {num_ranks} ranks")
                space = self._spaces.get(name)
                known_ns = space.changed_ns if space else self._ended.get(name, -1)
                if changed_ns <= known_ns:
                    continue
                try:
                    if num_ranks:
                        self._put(name, num_ranks, max(1, steps_retained), changed_ns)
                    else:
                        self._remove([name] if space else [])
                        self._end(name, changed_ns)
                except HttpError as error:
                    complain(f"the namespace {name} of another node: {error}")
            self._is_free.notify_all()

    def delete(self, name: str) -> None:
        """Remove a namespace with all that it holds; raises HttpError 404 where there is none."""
        with self._lock:
            self.get(name)
            self._end_all([name])
        self._peers.wake()

    def reset(self) -> None:
        """Remove all namespaces."""
        with self._lock:
            self._end_all(list(self._spaces))
        self._peers.wake()

    def _end_all(self, names: list[str]) -> None:
        self._remove(names)
        for each in names:
            self._end(each, time.time_ns())

    def _end(self, name: str, ended_ns: int) -> None:
        self._ended.pop(name, None)
        self._ended[name] = ended_ns
        while len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def latest(self, name: str, limit: int) -> list[int]:
        """Return the newest complete steps, newest first."""
        self._peers.wait_known()
        return complete_steps(self.steps(self.get(name)))[:limit]

    def steps(self, space: Space) -> Steps:
        """Return what a namespace holds now, on all nodes."""
        name = space.vault_name
        metas = {each.id: each for each in self._vault.metas() if each.id.namespace == name}
        there = [each for each in self._peers.copies() if each.meta_id.namespace == name]
        return sort_steps([*metas.values(), *(_meta(c) for c in there if c.meta_id not in metas)])

    def find(self, name: str, rank: int, step: int) -> ShardMeta:
        """Return what a reader of a shard gets; raises HttpError 404 where there is nothing."""
        self._peers.wait_known()
        meta = choose_shard(self.steps(self.get(name)), step, rank)
        if meta is None:
            raise HttpError(HTTPStatus.NOT_FOUND, "no such shard")
        return meta

    def drop_shard(self, name: str, rank: int, step: int) -> None:
        """Drop a shard; raises HttpError 404 where it is not held."""
        ids = shards_of(self.steps(self.get(name)), step, rank)
        if not ids:
            raise HttpError(HTTPStatus.NOT_FOUND, "no such shard")
        # The others first: a copy that they give back meanwhile goes, too.
        self._peers.drop(ids)
        with self._lock:
            self._drop(ids)

    @contextmanager
    def write(self, name: str, rank: int, step: int, *, wait_s: float) -> Iterator[Space]:
        """Let nobody else write this shard within the block.

        One who writes it already is waited for: its client has given up, and sends again.
        Raises HttpError 503 where that takes too long.
        """
        key = (name, rank, step)
        with self._is_free:
            if not self._is_free.wait_for(lambda: key not in self._writing, wait_s):
                raise retry_later("this shard is being written")
            space = self.get(name)
            self._writing.add(key)
        try:
            yield space
        finally:
            with self._is_free:
                self._writing.discard(key)
                self._is_free.notify_all()

    def choose_id(
        self, space: Space, rank: int, step: int, shard_meta: str, num_bytes: int
    ) -> ShardId | None:
        """Say under which name a shard is written; None where the same is held already."""
        with self._lock:
            return space.choose_id(self.steps(space), rank, step, shard_meta, num_bytes)

    def renew(self, space: Space, stale: ShardId) -> ShardId:
        """Return the name for a shard whose generation is over."""
        with self._lock:
            held = [each.generation for each in _ids(self._vault, space.vault_name)]
            space.generation = max(space.generation, stale.generation + 1, *held)
            return replace(stale, generation=space.generation)

    @contextmanager
    def still(self, space: Space) -> Iterator[None]:
        """Keep a namespace from being removed within the block; HttpError 404 if it is already."""
        with self._lock:
            if self._spaces.get(space.name) is not space:
                raise HttpError(HTTPStatus.NOT_FOUND, "no such namespace")
            yield

    def learn(self, space: Space, num_ranks: int) -> None:
        """Take note of how many ranks a namespace has now: its job has changed its world."""
        with self._lock:
            if space.num_ranks != num_ranks:
                space.num_ranks, space.changed_ns = num_ranks, time.time_ns()
                with suppress(OSError):  # it is learnt again
                    self._save()

    def settle(self, space: Space, step: int) -> None:
        """Drop what a step that may have become complete makes superfluous."""
        with self._lock:
            steps = self.steps(space)
            if step in complete_steps(steps):
                self._settle(space, steps, step)

    def settle_all(self) -> None:
        """Drop what is superfluous now, perhaps by what other nodes have got."""
        with self._lock:
            for space in list(self._spaces.values()):
                steps = self.steps(space)
                for step in complete_steps(steps)[:1]:
                    self._settle(space, steps, step)

    def _settle(self, space: Space, steps: Steps, finished: int) -> None:
        """Drop what a complete step makes superfluous, but never the last that is safe."""
        drops = plan_drops(steps, finished, space.steps_retained)
        if not drops or not self._peers.wait_known(timeout_s=0.0):
            return
        kept = find_safe(steps, self._safe(space.vault_name))
        self._drop([each for each in drops if each not in kept])

    def make_room(self, space: Space, step: int) -> bool:
        """Drop the next thing that a namespace can do without; False where there is nothing."""
        with self._lock:
            steps = self.steps(space)
            rooms = plan_room(
                steps,
                step,
                kept=find_safe(steps, self._safe(space.vault_name)),
                has_all_peers=not self._peers.missing(),
            )
            return any(self._drop(room) > 0 for room in rooms)

    def _drop(self, ids: list[ShardId]) -> int:
        return sum([self._vault.drop(each) for each in ids])

    def _remove(self, names: list[str]) -> None:
        spaces = [self._spaces.pop(each) for each in names]
        try:
            self._save()
        except OSError as error:
            self._spaces.update({each.name: each for each in spaces})
            raise HttpError(HTTPStatus.INSUFFICIENT_STORAGE, "no room for the list") from error
        for space in spaces:
            self._drop(_ids(self._vault, space.vault_name))
            space.claim.close()

    def _open(self, name: str, num_ranks: int, steps_retained: int) -> Space:
        try:
            claim = self._vault.claim(PREFIX + name, _JOB)
        except RefusedError as error:
            raise HttpError(HTTPStatus.CONFLICT, "another job has this namespace") from error
        ids = _ids(self._vault, PREFIX + name)
        return Space(
            name=name, num_ranks=num_ranks, steps_retained=steps_retained, claim=claim,
            generation=max((each.generation for each in ids), default=0),
        )  # fmt: skip

    def _save(self) -> None:
        content = {name: each.numbers for name, each in self._spaces.items()}
        new = self._path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(to_json(content))
        new.replace(self._path)

    def _load(self) -> None:
        """Take over what an earlier daemon has kept; drop what belongs to no namespace."""
        known = _read(self._path)
        held: dict[str, int] = {}
        for meta in self._vault.metas():
            if meta.id.namespace.startswith(PREFIX):
                name = meta.id.namespace.removeprefix(PREFIX)
                held[name] = max(held.get(name, 1), meta.num_shards)
        if known is None or not self._peers.is_alone:
            # The file is lost, the shards are not; or they are copies from other nodes.
            found = {name: (num_ranks, STEPS_RETAINED, 0) for name, num_ranks in held.items()}
            known = {**found, **(known or {})}
        for name, (num_ranks, steps_retained, changed_ns) in known.items():
            with suppress(HttpError):  # a job of another door has taken the name meanwhile
                self._spaces[name] = self._open(name, num_ranks, steps_retained)
                self._spaces[name].changed_ns = changed_ns
        for name in held.keys() - known.keys():
            self._drop(_ids(self._vault, PREFIX + name))


def _read(path: Path) -> dict[str, Numbers] | None:
    try:
        content = from_json(path.read_bytes())
        known = read_record(dict[str, Numbers], content, "list of namespaces")
    except (OSError, ValueError):
        return None
    if not all(NAMESPACE.match(name) for name in known):
        return None
    return {
        name: (min(max(1, num_ranks), MAX_RANKS), min(max(1, kept), MAX_STEPS), changed_ns)
        for name, (num_ranks, kept, changed_ns) in known.items()
    }


def _meta(copy: Copy) -> ShardMeta:
    """Return what is known of a shard that another node holds."""
    return ShardMeta(
        id=copy.meta_id, num_shards=copy.num_shards, num_bytes=copy.num_bytes,
        tensors=(), checksums=(), rest={METADATA: copy.is_metadata},
    )  # fmt: skip


def _ids(vault: Vault, namespace: str) -> list[ShardId]:
    return [each.id for each in vault.metas() if each.id.namespace == namespace]
