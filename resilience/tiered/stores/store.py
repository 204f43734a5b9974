"""Stores: where checkpoints lie when no node's memory holds them any more.

A store holds data, named by its content, and manifest entries, one for each shard
of each step, that name their data. Only the entry makes a shard count, and it is
written behind its data. The names are those of `paths`; an entry has its data's
digest behind the shard, so that a listing shows which data is in use:

    <namespace>/data/<digest>
    <namespace>/steps/<step>-g<generation>/<shard>.<digest>.json

A namespace belongs to one run (`owner`).

There are no locks: whoever deletes data looks for entries again afterwards, and
whoever writes an entry looks for its data again afterwards. One of the two sees
the other, so no entry stays without its data.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from resilience.tiered.errors import TierError
from resilience.tiered.paths import (
    check_namespace,
    data_key,
    data_prefix,
    parse_data_key,
    parse_step_key,
    step_key,
    steps_prefix,
)
from resilience.tiered.shard import ShardId, ShardMeta, content_digest, decode_meta, encode_meta
from resilience.tiered.stores.objects import Objects, Stored
from resilience.tiered.stores.owner import Lives, NamespaceOwner, claim_namespace

NO_DIGEST = "0" * 32
_TRIAL_BYTES = 64

ORPHAN_S = 24 * 3600.0
"""Age after which data that no entry names is nobody's: its writer ended in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    id: ShardId
    digest: str
    stored: Stored


class Store:
    """A lower tier, over any objects. Any thread may use it; every method blocks until a deadline.

    Whatever fails is a TierError with the store's own words. Nothing is checked
    but sizes: what is read has to be compared with the meta's checksums. Namespaces,
    shards and digests that no name can have are ValueError, as in `paths`.
    """

    def __init__(self, objects: Objects, *, orphan_s: float = ORPHAN_S) -> None:
        self._objects = objects
        self._orphan_s = orphan_s

    def try_out(self) -> None:
        """Write, read and delete an object of its own; TierError where one of them fails."""
        name = f"trial-{secrets.token_hex(8)}/object"
        content = secrets.token_bytes(_TRIAL_BYTES)
        self._objects.write(name, len(content), [memoryview(content)])
        found = bytearray(len(content))
        try:
            self._objects.read(name, len(content), 0, memoryview(found))
        except TierError:
            with suppress(TierError):  # the first of the two is told
                self._objects.delete([name])
            raise
        self._objects.delete([name])
        if found != content:
            raise TierError(f"reading {name}: it is not what was written")

    def claim(
        self, namespace: str, owner: NamespaceOwner, *, takes_over: bool, lives: Lives
    ) -> tuple[NamespaceOwner, ...]:
        """Have a namespace be a run's own; see `owner.claim_namespace`."""
        return claim_namespace(self._objects, namespace, owner, takes_over=takes_over, lives=lives)

    def put_data(
        self,
        namespace: str,
        digest: str,
        num_bytes: int,
        pieces: Iterable[memoryview],
        *,
        replaces: bool = False,
    ) -> bool:
        """Write the data of this digest; returns whether it was sent.

        Idempotent: where data of this digest and size is there already, nothing is
        sent and the pieces are not asked for, unless it `replaces` that. Until all of
        it is there, nobody sees any of it. What the pieces raise is passed on. Counts
        for nothing before `put_meta`.
        """
        name = data_key(namespace, digest)
        if not replaces and self._has(name, num_bytes):
            return False
        self._objects.write(name, num_bytes, pieces)
        return True

    def get_data(
        self, namespace: str, digest: str, num_bytes: int, into: memoryview, *, begin: int = 0
    ) -> None:
        """Fill `into` with the data's bytes from `begin` on.

        TierError where there is no such data, or not of `num_bytes`; `into` then
        holds anything. Nothing is written to it once this has returned.
        """
        if begin < 0 or begin + into.nbytes > num_bytes:
            raise ValueError(f"{into.nbytes} bytes from {begin} on are not in {num_bytes}")
        name = data_key(namespace, digest)
        if num_bytes:
            self._objects.read(name, num_bytes, begin, into.cast("B"))

    def has_data(self, meta: ShardMeta) -> bool:
        """Return whether the shard's data is there with all its bytes; they are not read."""
        return self._has(data_key(meta.id.namespace, content_digest(meta)), meta.num_bytes)

    def put_meta(self, meta: ShardMeta) -> None:
        """Write the entry that makes the shard count, behind its data.

        Idempotent; replaces another entry of the same shard. TierError where the
        data is not there, or was deleted meanwhile: the shard has to be put again.
        """
        digest = content_digest(meta)
        data = data_key(meta.id.namespace, digest)
        if not self.has_data(meta):
            raise TierError(f"{data} is not there with {meta.num_bytes} bytes; put it before")
        name = _entry_key(meta.id, digest)
        text = encode_meta(meta)
        self._objects.write(name, len(text), [memoryview(text)])
        if not self.has_data(meta):
            self._objects.delete([name])
            raise TierError(f"{data} was deleted while its entry was written; put it again")
        others = [each.stored.name for each in self._entries_of(meta.id) if each.digest != digest]
        self._objects.delete(others)

    def get_meta(self, id: ShardId) -> ShardMeta | None:  # noqa: A002
        """Return what the shard's entry says; None where there is none."""
        entries = self._entries_of(id)
        if not entries:
            return None
        entry = max(entries, key=lambda each: (each.stored.changed_s, each.digest))
        text = bytearray(entry.stored.num_bytes)
        self._objects.read(entry.stored.name, len(text), 0, memoryview(text))
        try:
            meta = decode_meta(bytes(text))
        except ValueError as error:
            raise TierError(f"{entry.stored.name}: {error}") from error
        if meta.id != id or content_digest(meta) != entry.digest:
            raise TierError(f"{entry.stored.name} describes another shard than its name says")
        return meta

    def list_steps(self, namespace: str) -> list[ShardId]:
        """Return all shards that count, in order; none for a namespace that is unknown.

        One listing: the data is not looked for.
        """
        return sorted({each.id for each in self._entries(namespace)})

    def delete_step(
        self, namespace: str, step: int, generation: int, *, spare: Collection[str] = ()
    ) -> set[str]:
        """Delete a step's entries, then the data that no other step of the namespace names.

        Data of the digests to `spare` stays: somebody may be about to name it. Returns the
        digests that were named all the same while their data went: those entries were
        deleted, too, and the shards have to be put again.

        Idempotent: a step that is not there is none to delete. Also removes what dead
        writers left, and data that nobody names when it is a day old: so goes what a
        deletion left that failed half-way.
        """
        self._objects.clean(check_namespace(namespace))
        entries = self._entries(namespace)
        doomed: list[_Entry] = []
        kept: list[_Entry] = []
        for each in entries:
            is_doomed = (each.id.step, each.id.generation) == (step, generation)
            (doomed if is_doomed else kept).append(each)
        self._objects.delete([each.stored.name for each in doomed])
        named = {each.digest for each in kept} | set(spare)
        gone = self._unnamed(namespace, named, {each.digest for each in doomed})
        if not gone:
            return set()
        self._objects.delete([data_key(namespace, each) for each in gone])
        late = [
            each
            for each in self._entries(namespace)
            if each.digest in gone and self._objects.find(data_key(namespace, each.digest)) is None
        ]
        self._objects.delete([each.stored.name for each in late])
        return {each.digest for each in late}

    def _unnamed(self, namespace: str, named: set[str], doomed: set[str]) -> set[str]:
        """Return the digests of data that no entry names, and that nobody is about to name."""
        before_s = time.time() - self._orphan_s
        unnamed = set()
        for each in self._objects.find_all(data_prefix(namespace)):
            with suppress(ValueError):
                _, digest = parse_data_key(each.name)
                is_old = digest in doomed or each.changed_s < before_s
                if is_old and digest not in named:
                    unnamed.add(digest)
        return unnamed

    def _has(self, name: str, num_bytes: int) -> bool:
        if not num_bytes:
            return True
        found = self._objects.find(name)
        return found is not None and found.num_bytes == num_bytes

    def _entries(self, namespace: str) -> list[_Entry]:
        return list(_parse(self._objects.find_all(steps_prefix(namespace))))

    def _entries_of(self, id: ShardId) -> list[_Entry]:  # noqa: A002
        prefix = _entry_key(id, NO_DIGEST).removesuffix(f"{NO_DIGEST}.json")
        return [each for each in _parse(self._objects.find_all(prefix)) if each.id == id]


def _parse(objects: Iterable[Stored]) -> Iterator[_Entry]:
    """Yield the entries among the objects; what else lies there is nobody's business."""
    for each in objects:
        with suppress(ValueError):
            named = parse_step_key(each.name)
            shard, _, digest = named.shard.rpartition(".")
            data_key(named.namespace, digest)
            yield _Entry(id=replace(named, shard=shard), digest=digest, stored=each)


def _entry_key(id: ShardId, digest: str) -> str:  # noqa: A002
    return step_key(replace(id, shard=f"{id.shard}.{digest}"))
