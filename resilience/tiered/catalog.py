"""What is where: which steps are complete, and where a shard is read from. Pure.

A step is told from its other histories by the generation whose gradients made it;
nothing is ever put together from two of them. Of each step counts

- one number of shards, should copies differ: the one that has all of its shards,
  else the one with the most copies,
- one digest for each shard: the one that S3 or a folder holds, else the one that the
  most nodes hold. Copies with another digest are no source and count for nothing.

A shard is safe when S3 or a folder has it, or the memory of enough failure domains;
a step is complete when each of its shards is safe.

Where peers hold shards instead of the node that wrote them, the copy of that node is
passing: it goes soon, and makes nothing safe. It counts only while there are too few others.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, StrictInt

from resilience.tiered.shard import ShardId
from resilience.validation import list_some

Number = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
"""A number from another node."""
Tier = Literal["ram", "s3", "folder"]
LowerTier = Literal["s3", "folder"]
LOWER_TIERS: tuple[LowerTier, ...] = ("s3", "folder")
"""The tiers that outlive all nodes, the nearer one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One shard at one place, as an inventory or a listing says."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    meta_id: ShardId
    num_shards: Number
    digest: str
    num_bytes: Number
    place: str
    """Name of the node that has it in memory, or of the bucket or folder."""
    tier: Tier
    is_passing: bool = False
    """The node has it only until enough others keep it instead."""
    is_metadata: bool = False
    """It is the metadata of AWS's client, the last shard of its step."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepAt:
    """One history of one step."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    step: Number
    generation: StrictInt

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What is known of one history of one step."""

    at: StepAt
    num_shards: int
    copies: Mapping[str, tuple[Copy, ...]]
    """By shard; of each shard equal copies only."""
    is_whole: bool
    """Each shard is somewhere."""
    is_complete: bool
    """Each shard is safe: in enough failure domains, or in S3 or a folder."""
    is_stale: bool
    """A newer generation has gone over this step or one before it."""
    whole_tiers: frozenset[Tier]
    """Tiers that make the step complete without any other."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """All steps of a namespace, newest first."""

    steps: tuple[StepState, ...] = ()
    num_domains: int = 0
    """In how many failure domains a shard has to be."""
    states: Mapping[StepAt, StepState] = field(default_factory=dict)

    @property
    def complete(self) -> tuple[StepState, ...]:
        """Return the steps that may be offered, newest first."""
        return tuple(each for each in self.steps if each.is_complete and not each.is_stale)


def step_of(copy: Copy) -> StepAt:
    """Return the step that a copy belongs to."""
    return StepAt(step=copy.meta_id.step, generation=copy.meta_id.generation)


def judge_steps(
    copies: Iterable[Copy],
    living: Mapping[str, str],
    *,
    namespace: str,
    domains_min: int,
    seen: Collection[StepAt] = (),
    keepers: int = 0,
) -> Catalog:
    """Judge every step of a namespace.

    `living` is the failure domain of each node that is there, this one included;
    what other nodes had in memory counts no more. `seen` are histories known to
    have been there, which make others stale though no copy of them is left.
    `keepers` is how many peers hold a shard instead of the node that wrote it; 0: none.
    """
    has_keepers = 0 < keepers < len(living)
    num_domains = max(1, min(domains_min, count_domains(living, keepers=keepers)))
    groups: dict[StepAt, list[Copy]] = defaultdict(list)
    for copy in _keep_living(copies, living):
        if copy.meta_id.namespace == namespace:
            is_passing = copy.is_passing and has_keepers
            counted = copy if copy.is_passing == is_passing else replace(copy, is_passing=False)
            groups[step_of(copy)].append(counted)
    stale = find_stale([*groups, *seen])
    steps = tuple(
        _judge(at, groups[at], living, num_domains, is_stale=at in stale)
        for at in sorted(groups, reverse=True)
    )
    return Catalog(steps=steps, num_domains=num_domains, states={each.at: each for each in steps})


def find_stale(steps: Iterable[StepAt]) -> frozenset[StepAt]:
    """Return the steps that a newer generation has made at that step or an earlier one.

    What an older generation has made before that step is the newer one's own past.
    """
    known = sorted(set(steps), key=lambda each: (each.step, -each.generation))
    stale = set()
    newest = None
    for each in known:
        if newest is not None and each.generation < newest:
            stale.add(each)
        else:
            newest = each.generation
    return frozenset(stale)


def choose_source(
    copies: Iterable[Copy], shard_id: ShardId, living: Mapping[str, str], *, own: str
) -> list[Copy]:
    """Order the copies of a shard from near to far.

    Own memory, a peer of the same failure domain, another peer, S3, a folder. Among
    equally near peers each node begins with another one, so that not all ask the same.
    """
    of_step = [
        copy
        for copy in _keep_living(copies, {**living, own: living.get(own, "")})
        if copy.meta_id.namespace == shard_id.namespace
        and step_of(copy) == StepAt(step=shard_id.step, generation=shard_id.generation)
    ]
    settled = _settle(of_step)[1].get(shard_id.shard, ())
    return sorted(settled, key=lambda copy: _order(copy, living, own))


def find_only_copies(catalog: Catalog, place: str) -> tuple[StepAt, str] | None:
    """Return the newest whole step of which a node alone holds something, and what."""
    whole = [each for each in catalog.steps if each.is_whole and not each.is_stale]
    shards = [
        _name(shard)
        for shard, held in (whole[0].copies.items() if whole else ())
        if {(copy.tier, copy.place) for copy in held} == {("ram", place)}
    ]
    return (whole[0].at, list_some(shards)) if shards else None


def _keep_living(copies: Iterable[Copy], living: Mapping[str, str]) -> list[Copy]:
    return [copy for copy in copies if copy.tier != "ram" or copy.place in living]


def _judge(
    at: StepAt,
    copies: Sequence[Copy],
    living: Mapping[str, str],
    num_domains: int,
    *,
    is_stale: bool,
) -> StepState:
    num_shards, shards = _settle(copies)
    missing = num_shards - len(shards)
    unsafe = {
        shard: domains
        for shard, held in shards.items()
        if not any(copy.tier != "ram" for copy in held)
        and (domains := _num_domains(held, living)) < num_domains
    }
    tiers: set[Tier] = {
        tier
        for tier in LOWER_TIERS
        if all(any(copy.tier == tier for copy in held) for held in shards.values())
    }
    if all(_num_domains(held, living) >= num_domains for held in shards.values()):
        tiers.add("ram")
    return StepState(
        at=at,
        num_shards=num_shards,
        copies=shards,
        is_whole=missing == 0,
        is_complete=missing == 0 and not unsafe,
        is_stale=is_stale,
        whole_tiers=frozenset(tiers if missing == 0 else ()),
        reason=_describe(num_shards, shards, unsafe, num_domains, is_stale=is_stale),
    )


def _settle(copies: Sequence[Copy]) -> tuple[int, dict[str, tuple[Copy, ...]]]:
    """Return the number of shards of one step, and by shard the copies that count."""
    layouts: dict[int, dict[str, list[Copy]]] = defaultdict(lambda: defaultdict(list))
    for copy in copies:
        layouts[copy.num_shards][copy.meta_id.shard].append(copy)
    if not layouts:
        return 0, {}
    num_shards = max(
        layouts,
        key=lambda num: (
            len(layouts[num]) == num,
            sum(len(held) for held in layouts[num].values()),
            num,
        ),
    )
    shards = layouts[num_shards]
    return num_shards, {shard: _agree(shards[shard]) for shard in sorted(shards)}


def _agree(copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """Return the copies of one digest, each place once."""
    by_digest: dict[str, dict[tuple[str, str], Copy]] = defaultdict(dict)
    for copy in copies:
        by_digest[copy.digest][copy.tier, copy.place] = copy
    digest = min(
        by_digest,
        key=lambda each: (
            -sum(tier != "ram" for tier, _ in by_digest[each]),
            -len(by_digest[each]),
            each,
        ),
    )
    return tuple(by_digest[digest][place] for place in sorted(by_digest[digest]))


def _num_domains(copies: Iterable[Copy], living: Mapping[str, str]) -> int:
    return len(
        {living[copy.place] for copy in copies if copy.tier == "ram" and not copy.is_passing}
    )


def count_domains(living: Mapping[str, str], *, keepers: int = 0) -> int:
    """Return in how many failure domains every node's shards can be; `keepers` as above."""
    sizes = Counter(living.values())
    # A domain of a single node has no copy of what that node wrote, if only others keep it.
    return len(sizes) - (0 < keepers < len(living) and 1 in sizes.values())


def _describe(
    num_shards: int,
    shards: Mapping[str, Sequence[Copy]],
    unsafe: Mapping[str, int],
    num_domains: int,
    *,
    is_stale: bool,
) -> str:
    if len(shards) != num_shards:
        text = f"{len(shards)} of {num_shards} shards"
    elif unsafe:
        listed = [f"{_name(shard)} in {num}" for shard, num in sorted(unsafe.items())]
        text = f"{list_some(listed)} of {num_domains} failure domains"
    else:
        text = f"complete: all {num_shards} shards are safe"
    return f"stale, as a newer generation went over it; {text}" if is_stale else text


def _order(copy: Copy, living: Mapping[str, str], own: str) -> tuple[int, bytes, str]:
    """Sort near before far, and equally near peers in an order of this node's own."""
    text = "\n".join((own, copy.meta_id.shard, copy.place))
    mixed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return _distance(copy, living, own), mixed, copy.place


def _distance(copy: Copy, living: Mapping[str, str], own: str) -> int:
    if copy.tier != "ram":
        return 3 + LOWER_TIERS.index(copy.tier)
    if copy.place == own:
        return 0
    return 1 if own in living and living[copy.place] == living[own] else 2


def _name(shard: str) -> str:
    return f"shard {shard}" if shard else "the whole state"
