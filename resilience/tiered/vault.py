"""What one node holds: shards in segments, by their names.

All doors use one vault. It drops nothing by itself: retention decides, and the daemon's
keeper calls `drop`. A shard is visible from its commit on, whole, or never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from resilience.tiered.arena import Arena, Segment
from resilience.tiered.errors import HeldError, StaleError, VaultFullError
from resilience.tiered.namespaces import Claim, Ledger, Runs
from resilience.tiered.shard import (
    ShardId,
    ShardMeta,
    content_digest,
    decode_metas,
    encode_meta,
    is_intact,
    num_pieces,
)
from resilience.tiered.stores.owner import NamespaceOwner

_JOBS_NAME = "jobs.json"
"""The file beside the segments that says whose namespaces are."""
_LOST_MAX = 4096


@dataclass(slots=True, eq=False)
class _Held:
    """A sealed segment and all shards whose content it is."""

    segment: Segment
    digest: str
    metas: dict[ShardId, ShardMeta] = field(default_factory=dict)
    num_pins: int = 0  # readings that are not closed: the segment is not used again before
    is_bad: bool = False

    def text(self) -> bytes:
        return b"\n".join(encode_meta(each) for each in self.metas.values())


class Holding(NamedTuple):
    """A shard that is held, and what lies behind it."""

    meta: ShardMeta
    digest: str
    segment_bytes: int
    """The memory that it takes, alone or with others of the same digest."""
    is_pinned: bool
    """Somebody reads it: its memory is not free before that is over."""


class Writing(AbstractContextManager["Writing"]):
    """A shard on its way into the vault; the caller fills `memory` and commits.

    A context manager: left without a commit, nothing was ever there. One thread.
    """

    def __init__(self, vault: Vault, shard_id: ShardId, num_bytes: int, segment: Segment) -> None:
        self.id = shard_id
        self.num_bytes = num_bytes
        self.segment = segment
        self._vault = vault
        self._is_open = True

    @property
    def file(self) -> int:
        """Return the segment's descriptor, to read and write; the vault's own."""
        return self.segment.file

    @property
    def memory(self) -> memoryview:
        """Return the shard's `num_bytes`, writable; mapped on first use."""
        return self.segment.memory[: self.num_bytes]

    def commit(self, meta: ShardMeta) -> ShardMeta:
        """Make the shard visible. Nobody may write to the segment from now on.

        Content that is held already under another id is not kept twice. Raises
        ValueError for a meta of another id or size, VaultFullError where its
        description finds no room; the writing is then aborted.
        """
        if not self._is_open:
            raise ValueError(f"the writing of {self.id} is over")
        self._is_open = False
        self._vault.finish(self, meta)
        return meta

    def abort(self, is_over: Callable[[], bool] | None = None) -> None:
        """Leave it; a no-op after a commit or an abort.

        `is_over` is asked, and may wait, where somebody else fills the segment: False
        where that one may still write to it. The segment is then not used again.
        """
        if self._is_open:
            self._is_open = False
            self._vault.give_up(self, is_over)

    def __exit__(self, *error: object) -> None:
        self.abort()


class Reading(AbstractContextManager["Reading"]):
    """A held shard that stays where it is until this is closed, dropped or not. One thread."""

    def __init__(self, vault: Vault, held: _Held, meta: ShardMeta) -> None:
        self.meta = meta
        self.segment = held.segment
        self.held = held
        self._vault = vault
        self._is_open = True

    @property
    def file(self) -> int:
        """Return the segment's descriptor, to read; the vault's own."""
        return self.segment.read_file

    @property
    def memory(self) -> memoryview:
        """Return the shard's bytes, read-only; mapped on first use."""
        return self.segment.memory[: self.meta.num_bytes].toreadonly()

    def close(self) -> None:
        """Let the segment go; a no-op the second time."""
        if self._is_open:
            self._is_open = False
            self._vault.unpin(self.held)

    def __exit__(self, *error: object) -> None:
        self.close()


class Vault:
    """The shards of an arena, with those that an earlier daemon has kept. Thread-safe.

    `on_change` is called after each commit, abort and drop, by the thread that did it, with no
    lock held; it must not raise. It may be set later, before there is a second thread.
    """

    def __init__(self, arena: Arena, *, on_change: Callable[[], None] | None = None) -> None:
        self._arena = arena
        self.prepare = arena.prepare  # of memory for shards to come
        self.on_change = on_change or (lambda: None)
        self._lock = threading.RLock()
        self._shards: dict[ShardId, _Held] = {}
        self._by_digest: dict[str, _Held] = {}
        self._writing: set[ShardId] = set()
        self._lost: set[ShardId] = set()
        self._ledger = Ledger(arena.folder / _JOBS_NAME, self._holds)
        self._find()

    @property
    def total_bytes(self) -> int:
        """Return the size of all segments, free ones included; never above the budget."""
        return self._arena.total_bytes

    @property
    def held_bytes(self) -> int:
        """Return the size of the segments that hold a shard."""
        with self._lock:
            return sum(each.segment.size_bytes for each in set(self._shards.values()))

    @property
    def free_bytes(self) -> int:
        """Return what neither shards nor writings take of the budget."""
        return self._arena.budget_bytes - self._arena.used_bytes

    @property
    def budget_bytes(self) -> int:
        """Return what the total never passes."""
        return self._arena.budget_bytes

    def begin(
        self, shard_id: ShardId, num_bytes: int, *, owner: str = "", is_copy: bool = False
    ) -> Writing:
        """Return a segment to be filled; `owner` is who may have one mapped already.

        Blocks while memory is made, some 0.1 to 3 s a GiB of what was not there before. Raises
        HeldError where this very id is held or being written, StaleError where a newer run went on
        from a step before this one or, unless it `is_copy` of what is elsewhere, a newer generation
        has written this step or a later one; VaultFullError without room, ValueError for no size.
        """
        if num_bytes < 0:
            raise ValueError(f"a shard of {num_bytes} bytes")
        with self._lock:
            self._admit(shard_id, is_copy=is_copy)
            self._writing.add(shard_id)
        try:
            return Writing(self, shard_id, num_bytes, self._arena.take(num_bytes, owner))
        except BaseException:
            with self._lock:
                self._writing.discard(shard_id)
                self._ledger.forget(shard_id.namespace)
            raise

    def adopt(self, meta: ShardMeta) -> bool:
        """Hold a shard whose content is held already under another id; False where it is not.

        Raises HeldError and StaleError as `begin` does, VaultFullError where its
        description finds no room.
        """
        with self._lock:
            held = self._by_digest.get(content_digest(meta))
            if held is None:
                return False
            self._admit(meta.id, is_copy=True)
            held.metas[meta.id] = meta
            try:
                self._arena.seal(held.segment, held.text())
            except VaultFullError:
                del held.metas[meta.id]
                self._ledger.forget(meta.id.namespace)
                raise
            self._shards[meta.id] = held
            self._lost.discard(meta.id)
        self.on_change()
        return True

    def find(self, shard_id: ShardId) -> ShardMeta | None:
        """Return what a held shard is, None where it is not held."""
        with self._lock:
            held = self._shards.get(shard_id)
            return held.metas[shard_id] if held else None

    def is_being_written(self, shard_id: ShardId) -> bool:
        """Return whether somebody writes a shard now."""
        with self._lock:
            return shard_id in self._writing

    def begun(self, namespace: str) -> set[tuple[int, int]]:
        """Return step and generation of what is being written, and was last by each generation."""
        with self._lock:
            known = self._ledger.find(namespace)
            last = ((step, number) for number, step in known.newest.items()) if known else ()
            writing = (each for each in self._writing if each.namespace == namespace)
            return {*last, *((each.step, each.generation) for each in writing)}

    def read(self, shard_id: ShardId) -> Reading:
        """Return a held shard, to be closed by the caller; KeyError where it is not held."""
        with self._lock:
            held = self._shards[shard_id]
            held.num_pins += 1
            return Reading(self, held, held.metas[shard_id])

    def drop(self, shard_id: ShardId) -> bool:
        """Hold a shard no longer; returns whether it was held.

        Who is reading it goes on; its memory is free after the last of them.
        """
        with self._lock:
            held = self._shards.get(shard_id)
            if held is None:
                return False
            self._drop(shard_id, held)
        self.on_change()
        return True

    def trim(self, free_bytes: int, *, owner: str) -> None:
        """Remove memory that is free until so much is left; first what this owner had."""
        self._arena.trim(free_bytes, owner=owner)

    def check(self, shard_id: ShardId) -> bool:
        """Hash a held shard again and say whether it is intact; KeyError where it is not held.

        One that is not is dropped, with all that share its content. Costs some 0.1 s a GiB.
        """
        with self.read(shard_id) as reading:
            meta, memory = reading.meta, reading.memory
            if all(is_intact(memory, meta, piece) for piece in range(num_pieces(meta.num_bytes))):
                return True
            with self._lock:
                reading.held.is_bad = True
                self._lost = (
                    {*self._lost, *reading.held.metas} if len(self._lost) < _LOST_MAX else set()
                )
                for each in list(reading.held.metas):
                    self._drop(each, reading.held)
        self.on_change()
        return False

    def metas(self) -> list[ShardMeta]:
        """Return all that is held now, in no order."""
        with self._lock:
            return [held.metas[each] for each, held in self._shards.items()]

    def holdings(self) -> list[Holding]:
        """Return all that is held now, with its digest and the memory it takes, in no order."""
        with self._lock:
            return [
                Holding(held.metas[each], held.digest, held.segment.size_bytes, held.num_pins > 0)
                for each, held in self._shards.items()
            ]

    def claim(self, namespace: str, job: str) -> Claim:
        """Give a job the right to a namespace, to be closed by the caller; it may have many.

        Raises RefusedError where another job has it, or has shards in it, found at the start too.
        """
        with self._lock:
            self._ledger.claim(namespace, job)
        return Claim(lambda: self._unclaim(namespace))

    def job_of(self, namespace: str) -> str | None:
        """Return the job that a namespace belongs to, None where that is nobody's."""
        with self._lock:
            return self._ledger.job_of(namespace)

    def is_claimed(self, namespace: str) -> bool:
        """Return whether a job has a claim to a namespace now."""
        with self._lock:
            return self._ledger.is_claimed(namespace)

    def own(self, namespace: str, owner: NamespaceOwner) -> None:
        """Keep whose a namespace is in the store; VaultFullError where there is no room."""
        with self._lock:
            self._ledger.own(namespace, owner)

    def owners(self) -> dict[str, NamespaceOwner]:
        """Return by namespace whose it is in the store, as this node was told."""
        with self._lock:
            return self._ledger.owners()

    def begin_run(
        self, namespace: str, *, step: int, first_generation: int, job: str | None = None
    ) -> None:
        """Take note that a run goes on from a step, with generations from a number on.

        Later steps of older generations are refused from now on, also such as are being written.
        Idempotent. Raises StaleError where a newer run has begun, or this one went on from another
        step, VaultFullError where it finds no room to be kept.
        """
        with self._lock:
            is_new = self._ledger.begin_run(namespace, first_generation, step, job)
        if is_new:
            self.on_change()

    def runs(self) -> dict[str, tuple[str | None, Runs]]:
        """Return by namespace the job that it belongs to, and its runs that are known."""
        with self._lock:
            return self._ledger.runs()

    def lost(self) -> frozenset[ShardId]:
        """Return what was dropped because it was damaged, as far as it is not held again."""
        with self._lock:
            return frozenset(self._lost)

    def finish(self, writing: Writing, meta: ShardMeta) -> None:
        """For Writing alone: make it visible."""
        try:
            _check_same(writing, meta)
            digest = content_digest(meta)
            with self._lock:
                self._check_run(meta.id)
                known = self._by_digest.get(digest)
                held = known or _Held(writing.segment, digest)
                held.metas[meta.id] = meta
                try:
                    self._arena.seal(held.segment, held.text())
                except VaultFullError:
                    del held.metas[meta.id]
                    raise
                self._shards[meta.id] = self._by_digest[digest] = held
                self._writing.discard(meta.id)
                self._lost.discard(meta.id)
                if known:
                    self._arena.free(writing.segment)
        except (ValueError, StaleError, VaultFullError):
            self.give_up(writing, None)
            raise
        self.on_change()

    def give_up(self, writing: Writing, is_over: Callable[[], bool] | None) -> None:
        """For Writing alone: it was never there."""
        with self._lock:
            # Somebody else may write this shard at once; the segment has to wait.
            self._writing.discard(writing.id)
            self._ledger.forget(writing.id.namespace)
        if is_over is None or is_over():
            self._arena.free(writing.segment)
        else:
            self._arena.discard(writing.segment)
        self.on_change()

    def unpin(self, held: _Held) -> None:
        """For Reading alone."""
        with self._lock:
            held.num_pins -= 1
            self._let_go(held)

    def _admit(self, shard_id: ShardId, *, is_copy: bool) -> None:
        """Take note of a shard that comes, or say why it may not; the caller has the lock."""
        if shard_id in self._shards:
            raise HeldError(f"{show(shard_id)} is held already")
        if shard_id in self._writing:
            raise HeldError(f"{show(shard_id)} is being written")
        self._check_run(shard_id)
        namespace = self._ledger.open(shard_id.namespace)
        is_old = namespace.is_stale(shard_id.step, shard_id.generation)
        is_of_old_run = any(shard_id.generation < first for first in namespace.runs)
        if not is_copy and (is_old or is_of_old_run):
            raise StaleError(
                f"{show(shard_id)} comes too late: a newer generation has written this step "
                "or a later one, or a newer run has begun"
            )
        namespace.see(shard_id.step, shard_id.generation)

    def _check_run(self, shard_id: ShardId) -> None:
        """Raise StaleError for what a newer run has gone back behind; the caller has the lock."""
        known = self._ledger.find(shard_id.namespace)
        if known and known.is_over(shard_id.step, shard_id.generation):
            why = "a newer run goes on from an earlier step"
            raise StaleError(f"{show(shard_id)} comes too late: {why}")

    def _holds(self, namespace: str) -> bool:
        return any(each.namespace == namespace for each in (*self._shards, *self._writing))

    def _unclaim(self, namespace: str) -> None:
        with self._lock:
            self._ledger.unclaim(namespace)

    def _drop(self, shard_id: ShardId, held: _Held) -> None:
        """Hold it no longer; the caller has the lock."""
        del self._shards[shard_id]
        del held.metas[shard_id]
        if not held.metas:
            # First of all: a daemon that ends here must not leave the shard to the next one.
            self._arena.unseal(held.segment)
            if self._by_digest.get(held.digest) is held:
                del self._by_digest[held.digest]
            self._let_go(held)
        elif not held.is_bad:
            # Without room for a new description the old one stays, and names one shard too many.
            with suppress(VaultFullError):
                self._arena.seal(held.segment, held.text())
        self._ledger.forget(shard_id.namespace)

    def _let_go(self, held: _Held) -> None:
        """Give back a segment that nobody names or reads; the caller has the lock."""
        if held.metas or held.num_pins:
            return
        if held.is_bad:
            # The memory itself may be at fault.
            self._arena.discard(held.segment)
        else:
            self._arena.free(held.segment)

    def _find(self) -> None:
        """Take over what the arena has found."""
        for found in self._arena.found:
            read = decode_metas(found.text, found.segment.size_bytes)
            metas = {each: meta for each, meta in read.items() if each not in self._shards}
            if not metas:
                self._arena.discard(found.segment)
                continue
            held = _Held(found.segment, content_digest(next(iter(metas.values()))), metas)
            self._by_digest[held.digest] = held
            self._shards.update(dict.fromkeys(metas, held))
        self._ledger.load({each.namespace for each in self._shards})
        for each in self._shards:
            self._ledger.open(each.namespace).see(each.step, each.generation)


def _check_same(writing: Writing, meta: ShardMeta) -> None:
    if meta.id != writing.id or meta.num_bytes != writing.num_bytes:
        raise ValueError(
            f"{show(meta.id)} of {meta.num_bytes} bytes is not what was begun: "
            f"{show(writing.id)} of {writing.num_bytes}"
        )


def show(shard_id: ShardId) -> str:
    """Return a shard's name for a person."""
    return (
        f"{shard_id.namespace} step {shard_id.step} generation {shard_id.generation} "
        f"shard {shard_id.shard}"
    )
