"""What goes from memory and from the lower tiers, and what never does. Pure.

Never dropped from memory:
- the newest complete step, nor the newest that is complete in memory alone,
- the newest step that was complete before nodes were gone: they may come back,
- the newest step that has all of its shards somewhere, though not yet safely,
- a step that a lower tier has to get and does not hold yet.

An unfinished step goes once a newer one is complete, and never by time alone: what it lacks
may be with nodes that are silent, who know it complete. Everything else goes once newer
complete steps fill the keep count, or at once where a newer generation has gone over it. For
want of room the keep count gives way, and what is unfinished for longer than its keep time;
the list above never does.

Where peers hold shards instead of the node that wrote them (Settings.keepers), that node's
own copy goes as soon as so many others keep it. At rest a node then has what it keeps for
others, and nothing of its own. The price: when a node is lost, so is what it kept for others,
whose owners are there but have it no longer. With one keeper the newest step is then complete
no more, until the next save is; what is left are the store's steps. With two keepers it stays.

A node that keeps k steps of r others needs (1 + r x (k + 1)) x its own state: a save, and the
old and the new steps of the others. With less, what does not fit yet stays where it was
written, and shards change places one by one: with one keeper, (1 + k) x state + one shard
still do, but a save that begins when others have sent theirs already may be refused.

A namespace that nobody claims or has used for long, on any node, is of a job that is over. For
want of room it goes last of all, and as a whole; what a lower tier has to get stays even then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from resilience.tiered.catalog import Catalog, Copy, LowerTier, StepAt, find_stale, step_of
from resilience.tiered.shard import ShardId
from resilience.tiered.uploads import View, find_wanted, judge, of_namespace

_LAST = 3
"""The rank of what goes last for want of room."""

_LISTED_MAX = 8
"""More steps than this make a reason no clearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPlan:
    """The shards that a node drops."""

    drops: tuple[ShardId, ...]
    passed: tuple[ShardId, ...]
    """What enough others keep instead by now; it may stay while somebody reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What workers of a node wrote last, where others are to keep it instead."""

    at: StepAt | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDropPlan:
    """What goes from a lower tier: descriptions first, then the bytes nothing names any more."""

    steps: tuple[StepAt, ...]
    """The oldest first."""
    spare: frozenset[str]
    """Digests whose bytes stay, though only what goes may name them."""
    node: str
    """Who does it; nobody else may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPlan:
    """How room is made for a save; nothing is dropped where it would not be enough."""

    is_enough: bool
    drops: tuple[ShardId, ...] = ()
    reason: str = ""
    """Reason for too little room."""


def plan_drops(view: View) -> DropPlan:
    """Decide which shards a node drops from its own memory, room or no room."""
    catalog = judge(view)
    kept = _find_kept(view, catalog)
    # An unfinished step stays even beyond its keep time: others may know it complete, and have
    # let go of it and of older ones.
    drops = [
        copy.meta_id
        for at, copies in _held(view).items()
        if not (at in kept or _why_counted(view, catalog, at) or _is_open(catalog, at))
        for copy in copies
    ]
    passed = _find_passed(view, catalog) - set(drops)
    return DropPlan(drops=tuple(sorted(drops)), passed=tuple(sorted(passed)))


def plan_room(
    views: Sequence[View], *, needed_bytes: int, free_bytes: int, begun: ShardId | None = None
) -> RoomPlan:
    """Decide what goes to make room for a save, over all namespaces of one node.

    The least valuable goes first: what others keep instead and what plan_drops would let go,
    then what is left of an older generation's unfinished step and unfinished steps that have
    a newer whole one behind them, then complete steps, the oldest first, then the namespaces
    of jobs that are over. Bytes that several shards share are free only when the last of them
    goes. `begun` is what the room is for: its generation may be newer than any that was seen.
    """
    if free_bytes >= needed_bytes:
        return RoomPlan(is_enough=True)
    candidates, kept = _rank_candidates(views, begun)
    sizes, users = _sizes(views)

    def freed(chosen: Collection[tuple[ShardId, ...]]) -> int:
        gone = {shard_id for group in chosen for shard_id in group}
        return sum(sizes[digest] for digest, ids in users.items() if ids <= gone)

    missing = needed_bytes - free_bytes
    chosen: list[tuple[ShardId, ...]] = []
    for group in candidates:
        if freed(chosen) >= missing:
            break
        chosen.append(group)
    if freed(chosen) < missing:
        return RoomPlan(
            is_enough=False, reason=_refusal(needed_bytes, free_bytes, freed(chosen), kept)
        )
    for group in reversed(tuple(chosen)):
        others = [each for each in chosen if each != group]
        if freed(others) >= missing:
            chosen = others
    drops = tuple(sorted(shard_id for group in chosen for shard_id in group))
    return RoomPlan(is_enough=True, drops=drops)


def plan_tier_drops(view: View, tier: LowerTier) -> TierDropPlan:
    """Decide what goes from a lower tier: steps beyond its keep count.

    What is unfinished there goes once a newer step is whole there and nobody adds to it, and
    what was found damaged counts as not there. Bytes that any shard in memory is made of stay:
    they may be about to be named.
    """
    catalog = judge(view)
    settings = view.settings.lower.get(tier)
    keep = settings.keep if settings else None
    whole = [each.at for each in catalog.steps if tier in each.whole_tiers]
    fresh = [at for at in whole if not catalog.states[at].is_stale]
    sent = {each.at for each in view.sendings if each.tier == tier}
    staying = {*fresh[:keep], *find_wanted(view, catalog, tier), *sent}
    known = [*of_namespace(view), *view.damaged]
    there = [copy for copy in known if copy.tier == tier]
    stale = {each.at for each in catalog.steps if each.is_stale}
    stale |= find_stale([*catalog.states, *view.seen, *map(step_of, view.damaged)]) - {*whole}
    gone = {
        at
        for at in {step_of(copy) for copy in there} - staying
        if fresh and (at in stale or at < fresh[0])
    }
    spare = {
        copy.digest
        for copy in known
        if copy.tier == "ram" or (copy.tier == tier and step_of(copy) not in gone)
    }
    spare |= {each.digest for each in view.sendings if each.tier == tier}
    return TierDropPlan(steps=tuple(sorted(gone)), spare=frozenset(spare), node=min(view.living))


def find_save(view: View, before: Save) -> Save:
    """Return the newest save of this node, as big as it was ever seen; `before` it was so big."""
    passing = [c for c in of_namespace(view) if c.is_passing and c.place == view.own]
    at = max(map(step_of, passing), default=None)
    if at is None:
        return before
    num_bytes = sum(copy.num_bytes for copy in passing if step_of(copy) == at)
    return Save(at=at, num_bytes=max(num_bytes, before.num_bytes if before.at == at else 0))


def _held(view: View) -> dict[StepAt, list[Copy]]:
    """Return what this node has in memory, by step."""
    held: dict[StepAt, list[Copy]] = defaultdict(list)
    for copy in of_namespace(view):
        if copy.tier == "ram" and copy.place == view.own:
            held[step_of(copy)].append(copy)
    return held


def _find_passed(view: View, catalog: Catalog) -> set[ShardId]:
    """Return what this node has passed on to all who are to keep it."""
    passed = set()
    for held in (each for state in catalog.steps for each in state.copies.values()):
        keepers = {each.place for each in held if each.tier == "ram" and not each.is_passing}
        domains = {view.living[each] for each in keepers}
        if len(keepers) >= view.settings.keepers and len(domains) >= catalog.num_domains:
            passed |= {each.meta_id for each in held if each.is_passing and each.place == view.own}
    return passed


def _find_kept(view: View, catalog: Catalog) -> dict[StepAt, str]:
    """Return what never goes, and why."""
    fresh = [each for each in catalog.steps if not each.is_stale]
    if not catalog.complete:
        fresh = [*fresh, *(each for each in catalog.steps if each.is_stale and each.is_complete)]
    firsts = (
        ([each.at for each in fresh if each.is_whole], "the newest of which all shards are there"),
        ([each.at for each in fresh if "ram" in each.whole_tiers], "the newest complete in memory"),
        ([each.at for each in fresh if each.is_complete], "the newest complete step"),
    )
    kept = {}
    for each in view.sendings:
        if each.node == view.own:
            kept[each.at] = f"on its way to {each.tier}"
    for tier in view.settings.lower:
        kept.update(dict.fromkeys(find_wanted(view, catalog, tier), f"{tier} has to get it"))
    kept.update({steps[0]: reason for steps, reason in firsts if steps})
    last = view.last_complete
    if last and last in catalog.states and not catalog.states[last].is_stale:
        kept.setdefault(last, "the newest that was complete")
    return kept


def _why_counted(view: View, catalog: Catalog, at: StepAt) -> str:
    """Say why a step stays though it might go for want of room; empty where it goes."""
    newest = [each.at for each in catalog.complete[: view.settings.keep]]
    if at in newest:
        return f"one of the newest {len(newest)} complete steps"
    age_s = view.now_s - view.since_s.get(at, view.now_s)
    if _is_open(catalog, at) and age_s < view.settings.incomplete_s:
        return f"unfinished, for {age_s:g} of {view.settings.incomplete_s:g} s"
    return ""


def _is_open(catalog: Catalog, at: StepAt) -> bool:
    """Return whether a step may yet be the newest complete one."""
    state, newest = catalog.states[at], catalog.complete[:1]
    is_newer = not newest or at > newest[0].at
    return not state.is_complete and not state.is_stale and is_newer


def _rank_candidates(
    views: Iterable[View], begun: ShardId | None
) -> tuple[list[tuple[ShardId, ...]], list[str]]:
    """Return the steps that may go from this node, the first to go first, and why others stay."""
    ranked: list[tuple[tuple[int, StepAt, str], tuple[ShardId, ...]]] = []
    kept = []
    for view in views:
        catalog = judge(view)
        never, passed = _find_kept(view, catalog), _find_passed(view, catalog)
        is_over = view.is_over and not view.sendings
        is_over &= not any(find_wanted(view, catalog, tier) for tier in view.settings.lower)
        rest: list[ShardId] = []
        for at, copies in _held(view).items():
            own = [copy.meta_id for copy in copies if copy.meta_id in passed]
            ranked += [((0, at, view.namespace), (each,)) for each in own]
            rank = _rank(view, catalog, at, begun)
            if is_over and (at in never or rank is None):
                rest += {copy.meta_id for copy in copies} - passed
            elif at in never or rank is None:
                reason = never.get(at) or _why_counted(view, catalog, at)
                kept.append(f"{at} of {view.namespace}: {reason}")
            else:
                if group := tuple(sorted({copy.meta_id for copy in copies} - passed)):
                    ranked.append(((rank, at, view.namespace), group))
        if rest:
            ranked.append(((_LAST, max(_held(view)), view.namespace), tuple(sorted(rest))))
    return [group for _, group in sorted(ranked)], sorted(kept)


def _rank(view: View, catalog: Catalog, at: StepAt, begun: ShardId | None) -> int | None:
    """Return how early a step goes for want of room; None for one that has to be let finish.

    An unfinished one need not finish where a newer one is whole: that stays, and will do.
    Else nodes that save faster than they copy fill up, and none has room for another's copies.
    """
    if not _why_counted(view, catalog, at):
        return 0
    state = catalog.states[at]
    if state.is_complete:
        return 2
    newest = max(each.generation for each in (*catalog.states, *view.seen))
    if begun is not None and begun.namespace == view.namespace:
        newest = max(newest, begun.generation)
    is_overtaken = any(
        each.is_whole and not each.is_stale and each.at > at for each in catalog.steps
    )
    is_left = not state.is_whole and at.generation < newest
    return 1 if is_overtaken or is_left else None


def _sizes(views: Iterable[View]) -> tuple[dict[str, int], dict[str, set[ShardId]]]:
    """Return by digest what this node has in memory: its bytes, and which shards they are."""
    sizes: dict[str, int] = {}
    users: dict[str, set[ShardId]] = defaultdict(set)
    for view in views:
        for copy in (each for held in _held(view).values() for each in held):
            sizes[copy.digest] = copy.num_bytes
            users[copy.digest].add(copy.meta_id)
    return sizes, users


def _refusal(needed_bytes: int, free_bytes: int, freed_bytes: int, kept: Sequence[str]) -> str:
    what = f"only {freed_bytes} bytes may go" if freed_bytes else "nothing may go"
    listed = "; ".join(kept[:_LISTED_MAX]) or "this node holds nothing"
    return f"{needed_bytes} bytes needed, {free_bytes} free, {what}: {listed}"
