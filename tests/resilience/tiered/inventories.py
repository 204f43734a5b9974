"""Inventories of up to 16 nodes, for tests of what is decided from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hypothesis import strategies as st

from resilience.tiered.catalog import Copy, StepAt, Tier, step_of
from resilience.tiered.shard import ShardId
from resilience.tiered.uploads import Cadence, Settings, TierSettings, View

NAMESPACE = "run"
Living = Mapping[str, str]


def shard_id(step: int, generation: int = 1, shard: str = "0") -> ShardId:
    return ShardId(namespace=NAMESPACE, step=step, generation=generation, shard=shard)


def at(step: int, generation: int = 1) -> StepAt:
    return StepAt(step=step, generation=generation)


def copy(
    place: str,
    step: int,
    generation: int = 1,
    shard: str = "0",
    *,
    of: int = 1,
    tier: Tier = "ram",
    digest: str = "",
    num_bytes: int = 10,
) -> Copy:
    return Copy(
        meta_id=shard_id(step, generation, shard),
        num_shards=of,
        digest=digest or f"{step}/{generation}/{shard}/{of}",
        num_bytes=num_bytes,
        place=place,
        tier=tier,
    )


def everywhere(
    places: Iterable[str], step: int, generation: int = 1, *, of: int = 1, tier: Tier = "ram"
) -> list[Copy]:
    """Every shard of a step at each of the places."""
    return [
        copy(place, step, generation, str(shard), of=of, tier=tier)
        for place in places
        for shard in range(of)
    ]


@st.composite
def clusters(draw: st.DrawFn) -> Living:
    """Nodes and their failure domains."""
    num_nodes = draw(st.integers(1, 16))
    num_domains = draw(st.integers(1, num_nodes))
    return {f"n{node}": f"d{node % num_domains}" for node in range(num_nodes)}


@st.composite
def inventories(draw: st.DrawFn, living: Living) -> tuple[Copy, ...]:
    """Copies of a few steps of up to three generations, on nodes there and gone, and below."""
    num_shards = draw(st.integers(1, 3))
    places = [*living, "gone"]
    copies: list[Copy] = []
    histories = st.tuples(st.sampled_from(range(0, 60, 10)), st.integers(0, 2))
    for step, generation in draw(st.lists(histories, min_size=1, max_size=6, unique=True)):
        num_bytes = draw(st.integers(1, 9))
        is_shared = draw(st.booleans())
        for shard in range(num_shards):
            digest = f"same-{num_bytes}" if is_shared else f"{step}-{generation}-{shard}"
            holders = draw(st.lists(st.sampled_from(places), max_size=5, unique=True))
            lower = draw(st.sampled_from([(), (), (), ("s3",), ("folder",), ("s3", "folder")]))
            spots: list[tuple[str, Tier]] = [(holder, "ram") for holder in holders]
            spots += [(f"the-{tier}", tier) for tier in lower]
            copies += [
                copy(
                    place,
                    step,
                    generation,
                    str(shard),
                    of=num_shards,
                    tier=tier,
                    digest=digest,
                    num_bytes=num_bytes if is_shared else 10 + shard,
                )
                for place, tier in spots
            ]
    return tuple(copies)


def is_complete(
    copies: Iterable[Copy],
    living: Living,
    step: StepAt,
    domains_min: int,
    *,
    ram_only: bool = False,
) -> bool:
    """Say it once more, in the plainest way, for inventories without contradictions."""
    own = [
        each
        for each in copies
        if (each.meta_id.step, each.meta_id.generation) == (step.step, step.generation)
    ]
    if not own:
        return False
    wanted = min(domains_min, len(set(living.values())))
    for shard in range(own[0].num_shards):
        held = [each for each in own if each.meta_id.shard == str(shard)]
        domains = {living[c.place] for c in held if c.tier == "ram" and c.place in living}
        is_below = not ram_only and any(each.tier != "ram" for each in held)
        if not is_below and len(domains) < wanted:
            return False
    return True


def view(
    copies: Iterable[Copy], living: Living, own: str = "a", *, settings: Settings, **changes: Any
) -> View:
    """What a node knows at second 1000 when it has known all steps since second 0."""
    copies = tuple(copies)
    since_s = dict.fromkeys(map(step_of, copies), 0.0)
    values: dict[str, Any] = {"now_s": 1000.0, "since_s": since_s, "whole_since_s": since_s}
    return View(
        namespace=NAMESPACE,
        own=own,
        settings=settings,
        copies=copies,
        living=living,
        **{**values, **changes},
    )


def every(steps: int, **changes: Any) -> TierSettings:
    return TierSettings(cadence=Cadence(every_n_steps=steps), **changes)


def without(copies: Iterable[Copy], place: str, ids: Collection[ShardId]) -> tuple[Copy, ...]:
    """What is left when a place drops shards."""
    return tuple(each for each in copies if each.place != place or each.meta_id not in ids)
