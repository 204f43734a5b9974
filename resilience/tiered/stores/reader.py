"""Reads steps straight from a store, without a daemon: those of somebody else's namespace.

A daemon keeps and deletes what is in the namespaces that it knows. What is only to be read never
comes to its notice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager

from resilience.tiered.client import StepOnOffer
from resilience.tiered.errors import TierError
from resilience.tiered.lending import Check
from resilience.tiered.shard import ShardId, ShardMeta, content_digest
from resilience.tiered.stores.entries import EntryReader
from resilience.tiered.stores.store import Store


class StoredShard(AbstractContextManager["StoredShard"]):
    """A shard that was read. A context manager, as what a daemon lends is."""

    def __init__(
        self, memory: memoryview, meta: ShardMeta, source: str, on_bad: Callable[[], None]
    ) -> None:
        self.memory = memory
        """The shard's bytes, which nothing has compared with its checksums yet."""
        self.meta = meta
        self.source = source
        self._on_bad = on_bad

    def bad(self, *, check: Check | None = None) -> bool:
        """Say that the bytes do not fit their checksums: there is no other copy to read next."""
        self._on_bad()
        return False

    def __exit__(self, *error: object) -> None:
        self.memory.release()


class StoreReader:
    """The steps of one namespace of a store. Each call blocks until the store's deadline."""

    def __init__(self, store: Store, namespace: str, *, source: str) -> None:
        self._store = store
        self._namespace = namespace
        self._source = source
        """What a person is told of where it came from."""
        self._bad: set[ShardId] = set()
        """Shards whose bytes were just found damaged."""
        self.left_out: dict[tuple[int, int], str] = {}
        """By step and generation why it is not whole, where a shard is damaged."""

    def steps(self, *, check: Check | None = None, reads_all: bool = False) -> list[StepOnOffer]:
        """Return the steps that have shards there, newest first. Raises TierError.

        Of each step one description is read, or all with `reads_all`. A step of which one was
        found damaged, or without its data, is never whole; `left_out` has the reason. The step
        stays in the list, since it tells which older histories are over.
        """
        self.left_out.clear()
        shards: dict[tuple[int, int], list[ShardId]] = defaultdict(list)
        for each in self._store.list_steps(self._namespace):
            shards[each.step, each.generation].append(each)
        entries = EntryReader(self._store, self._leave_out)
        offers = []
        for (step, generation), found in sorted(shards.items(), reverse=True):
            num_shards, readable = 0, []
            for each in found:
                if not num_shards or reads_all:
                    if (meta := entries.read(each)) is None:
                        continue
                    # Of a step that is deleted just now the description goes before the data.
                    if not self._store.has_data(meta) and self._store.get_meta(each):
                        text = f"the {meta.num_bytes} bytes of shard {each.shard} are not there"
                        self._leave_out(each, TierError(text))
                        continue
                    num_shards = meta.num_shards
                readable.append(each.shard)
            if readable or (step, generation) in self.left_out:
                offers.append(
                    StepOnOffer(
                        step=step,
                        generation=generation,
                        num_shards=num_shards or len(found),
                        shards=tuple(readable),
                    )
                )
        if self.left_out and not any(each.shards for each in offers):
            raise TierError(next(iter(self.left_out.values())))
        return offers

    def _leave_out(self, shard_id: ShardId, error: TierError) -> None:
        self.left_out.setdefault((shard_id.step, shard_id.generation), str(error))

    def read(
        self,
        *,
        step: int,
        generation: int,
        shard: str,
        timeout_s: float = 0.0,
        check: Check | None = None,
    ) -> StoredShard:
        """Return a shard's bytes; KeyError where there is none. The store's own deadline counts.

        After one that was bad it raises TierError once: whoever tries again later reads anew.
        """
        shard_id = ShardId(namespace=self._namespace, step=step, generation=generation, shard=shard)
        if shard_id in self._bad:
            self._bad.discard(shard_id)
            raise TierError("its bytes in the store are not what their checksums say")
        if (meta := self._store.get_meta(shard_id)) is None:
            raise KeyError(shard)
        memory = memoryview(bytearray(meta.num_bytes))
        if check is not None:
            check()
        try:
            self._store.get_data(self._namespace, content_digest(meta), meta.num_bytes, memory)
        except TierError:
            memory.release()
            raise
        return StoredShard(memory, meta, self._source, lambda: self._bad.add(shard_id))
