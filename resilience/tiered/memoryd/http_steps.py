"""Which steps of an HTTP namespace are complete, and which go. Pure.

The protocol knows no end of a step and no generation. A step is complete when all its
ranks are there, as many as its namespace has announced. The client stores its metadata as
one rank more, after all others, and announces no other number when its world has changed:
where that shard is there, it is the last one, and its rank tells the number.

A step that is saved again, by a run that went back, is written under a new generation: the
earlier one stays what is read until the new one is complete, so that two histories of one
step never mix. Where the earlier one was torn, ranks that it lacked come into it before one
that it has tells that this is another run. So a version with metadata, which comes after all
ranks, takes what it lacks from the one before it, if that has none of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from resilience.tiered.shard import ShardId, ShardMeta

METADATA = "is_metadata"
"""In a shard's rest: it is the client's metadata."""

_MARK = b"torch.distributed.checkpoint.metadata"
_MARK_END = 128


def is_metadata(body: bytes | memoryview) -> bool:
    """Return whether a shard is a DCP metadata as the client stores it, from its first bytes alone.

    It is a pickle, whose first words name the module of its class; it is not unpickled.
    """
    return _MARK in bytes(body[:_MARK_END])


@dataclass(slots=True)
class Version:
    """What is held of one step under one generation."""

    shards: dict[int, ShardMeta] = field(default_factory=dict)
    """By rank."""

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks are there."""
        last = self.metadata_rank
        num_ranks = last + 1 if last >= 0 else max(m.num_shards for m in self.shards.values())
        return len(self.shards) >= num_ranks and all(
            each in self.shards for each in range(num_ranks)
        )

    @property
    def is_closed(self) -> bool:
        """Return whether all ranks are there and nothing belongs to them any more."""
        return self.metadata_rank >= 0 and self.is_complete

    @property
    def metadata_rank(self) -> int:
        """Return the rank of the client's metadata, which is the last one; -1: it is not there."""
        return max(
            (rank for rank, meta in self.shards.items() if meta.rest.get(METADATA)), default=-1
        )


Steps = Mapping[int, Mapping[int, Version]]
"""Versions by step and generation."""


def sort_steps(metas: Iterable[ShardMeta]) -> Steps:
    """Return one namespace's shards by step, generation and rank."""
    steps: dict[int, dict[int, Version]] = {}
    for meta in metas:
        if meta.id.shard.isdecimal():
            versions = steps.setdefault(meta.id.step, {})
            versions.setdefault(meta.id.generation, Version()).shards[int(meta.id.shard)] = meta
    for versions in steps.values():
        _fill_up(versions)
    return steps


def complete_steps(steps: Steps) -> list[int]:
    """Return the steps of which a version is complete, newest first."""
    return sorted((step for step, versions in steps.items() if _complete(versions)), reverse=True)


def choose_shard(steps: Steps, step: int, rank: int) -> ShardMeta | None:
    """Return what a reader of a step gets: of its newest complete version, else the newest."""
    versions = steps.get(step, {})
    complete = _complete(versions)
    for generation in complete[:1] or sorted(versions, reverse=True):
        if meta := versions[generation].shards.get(rank):
            return meta
    return None


def choose_generation(
    versions: Mapping[int, Version], rank: int, shard_meta: str, num_bytes: int
) -> int | None:
    """Say under which of a step's generations a shard is written; None: it is held already.

    The answer may be one more than the newest generation that is there. The same content a
    second time is a request that was sent again, unless the step is complete: then a run
    that went back saves the step again. Only the last rank is still sent again then, since
    its answer may have been lost.
    """
    newest = max(versions)
    version = versions[newest]
    held = version.shards.get(rank)
    if held is None:
        return newest + 1 if version.is_closed else newest
    is_same = held.rest.get("shard_meta") == shard_meta and held.num_bytes == num_bytes
    if is_same and (not version.is_complete or rank == max(version.shards)):
        return None
    return newest + 1


def plan_drops(steps: Steps, finished: int, steps_retained: int) -> list[ShardId]:
    """Return what goes when a step has become complete.

    Earlier versions of the step, older steps that are not complete, and complete ones beyond
    the newest `steps_retained`. Never the last complete step.
    """
    gone = set(complete_steps(steps)[max(1, steps_retained) :])
    gone |= {step for step in steps if step < finished and not _complete(steps[step])}
    drops = [each for step in sorted(gone) for each in shards_of(steps, step)]
    for step in set(steps) - gone:
        drops += _superseded(steps[step])
    return drops


def find_safe(steps: Steps, safe: Collection[ShardId]) -> set[ShardId]:
    """Return the newest complete version of which all shards are safe; nothing where none is."""
    for step in complete_steps(steps):
        shards = steps[step][_complete(steps[step])[0]].shards.values()
        if all(each.id in safe for each in shards):
            return {each.id for each in shards}
    return set()


def plan_room(
    steps: Steps, writing: int, *, kept: Collection[ShardId] = (), has_all_peers: bool = True
) -> list[list[ShardId]]:
    """Return what may go where there is no room for a shard of a step, step by step in order.

    First what no reader will be given, the oldest first: superseded versions, and earlier steps
    that were never completed. Then complete steps from the oldest on, though they would have
    been retained, and last what was begun of later steps by a run that went back. Never the
    newest complete step, the one that is written, nor what is `kept`. Without all peers nor
    what was begun after the newest complete step: they may have the rest.
    """
    complete = complete_steps(steps)
    begun = [step for step in sorted(steps) if step not in complete and step != writing]
    if not has_all_peers:
        begun = [step for step in begun if complete and step < complete[0]]
    newest = max([writing, *complete[:1]])
    rooms = [
        shards_of(steps, step) if step in begun else _superseded(steps[step])
        for step in sorted(steps)
        if step != writing and not (step in begun and step > newest)
    ]
    olds = [step for step in reversed(complete[1:]) if step != writing]
    lates = [step for step in begun if step > newest]
    rooms += [shards_of(steps, step) for step in (*olds, *lates)]
    left = ([each for each in room if each not in kept] for room in rooms)
    return [each for each in left if each]


def shards_of(steps: Steps, step: int, rank: int | None = None) -> list[ShardId]:
    """Return all that is held of a step, or of one rank of it."""
    found = {
        meta.id: None
        for version in steps.get(step, {}).values()
        for number, meta in version.shards.items()
        if rank is None or rank == number
    }
    return list(found)


def _fill_up(versions: Mapping[int, Version]) -> None:
    """Give versions with metadata what they lack; see the module."""
    numbers = sorted(versions)
    for lower, number in itertools.pairwise(numbers):
        before, version = versions[lower], versions[number]
        if before.metadata_rank < 0:
            for rank in range(version.metadata_rank):
                if rank in before.shards:
                    version.shards.setdefault(rank, before.shards[rank])


def _superseded(versions: Mapping[int, Version]) -> list[ShardId]:
    complete = _complete(versions)
    if not complete:
        return []
    used = {meta.id for meta in versions[complete[0]].shards.values()}
    return [
        meta.id
        for generation, version in versions.items()
        if generation < complete[0]
        for meta in version.shards.values()
        if meta.id not in used
    ]


def _complete(versions: Mapping[int, Version]) -> list[int]:
    """Return the generations under which a step is complete, newest first."""
    return sorted((each for each in versions if versions[each].is_complete), reverse=True)
