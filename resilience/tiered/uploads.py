"""When a step goes to which tier, and who sends it. Pure.

A step goes to S3 or a folder once each of its shards is somewhere: where a failure
domain is missing, the lower tier is what makes it complete. What has begun is ended
first, then the newest goes. Equal bytes go once a job, whoever holds them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from resilience.tiered.catalog import (
    Catalog,
    Copy,
    LowerTier,
    StepAt,
    StepState,
    judge_steps,
    step_of,
)
from resilience.tiered.placement import mix
from resilience.tiered.shard import ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often a tier gets a step: by steps or by seconds."""

    every_n_steps: int | None = None
    every_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """What one tier gets, and how much of it stays there."""

    cadence: Cadence
    keep: int | None = None
    """How many complete steps stay; None keeps all."""
    waiting_max: int | None = None
    """How many steps may wait in memory for this tier; with None every one that is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Frequencies, keep counts and keep times of a namespace."""

    keep: int = 1
    """How many complete steps stay in memory."""
    domains_min: int = 2
    keepers: int = 0
    """How many peers hold a shard instead of the node that wrote it, which then lets go of it;
    0: none, each node keeps what it wrote."""
    incomplete_s: float = 600.0
    """Keep time of a step that is being written or copied, where room is needed for others."""
    expire_s: float = math.inf
    """After so long without any use a namespace may go as a whole for want of room."""
    settle_s: float = 0.0
    """How long a step is whole before it is sent on, so that all nodes know who holds what."""
    lower: Mapping[LowerTier, TierSettings] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sending:
    """A node has begun to send a shard's bytes to a lower tier."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    tier: LowerTier
    at: StepAt
    digest: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one node knows of one namespace at one moment."""

    namespace: str
    own: str
    settings: Settings
    copies: tuple[Copy, ...]
    living: Mapping[str, str]
    """Failure domain of each node that is there, this one included."""
    now_s: float
    since_s: Mapping[StepAt, float] = field(default_factory=dict)
    """When this node first saw a step; one that is not named was seen just now."""
    whole_since_s: Mapping[StepAt, float] = field(default_factory=dict)
    """When this node first saw a step whole; one that is not named was seen just now."""
    begun_s: Mapping[LowerTier, float] = field(default_factory=dict)
    """When a tier last began to get a step, by any node."""
    sendings: tuple[Sending, ...] = ()
    """Uploads under way on any node, as the inventories say."""
    seen: frozenset[StepAt] = frozenset()
    """Histories known to have been there."""
    last_complete: StepAt | None = None
    """The newest step that was ever complete here; it need not be so now, with nodes gone."""
    is_over: bool = False
    """No node that is there has a job that claims the namespace, nor has used it for long."""
    damaged: tuple[Copy, ...] = ()
    """What lower tiers hold that was read, and is not what it was: good for nobody."""

    def __post_init__(self) -> None:
        if self.own not in self.living:
            raise ValueError(f"node {self.own} is not among the living; want it with its domain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One shard's bytes, and all descriptions that need them, on their way to a lower tier."""

    tier: LowerTier
    at: StepAt
    """The first step that needs them."""
    digest: str
    node: str
    """Who sends them; nobody else may."""
    shard_ids: tuple[ShardId, ...]
    """Whose descriptions are written once the bytes are there."""


def decide_save(cadence: Cadence, *, step: int, now_s: float, last_s: float | None) -> bool:
    """Decide whether a step is saved.

    Clocks differ: with seconds, one rank decides for all.
    """
    if cadence.every_n_steps is not None:
        return step % cadence.every_n_steps == 0
    return last_s is None or now_s - last_s >= (cadence.every_s or 0.0)


def judge(view: View) -> Catalog:
    """Return the steps of a view's namespace."""
    return judge_steps(
        view.copies,
        view.living,
        namespace=view.namespace,
        domains_min=view.settings.domains_min,
        seen=view.seen,
        keepers=view.settings.keepers,
    )


def plan_uploads(view: View) -> list[Upload]:
    """Decide what the lower tiers get now, the first to send first, and who sends it.

    Every node computes the same from the same view. Of the nodes that hold a digest the
    one that has begun sends it, else one that the digest picks; when it is gone, the next.
    """
    catalog = judge(view)
    uploads: list[Upload] = []
    for tier in view.settings.lower:
        settled = [at for at in find_wanted(view, catalog, tier) if _is_settled(view, at)]
        uploads += _assign(view, tier, [catalog.states[at] for at in settled])
    return uploads


def find_wanted(view: View, catalog: Catalog, tier: LowerTier) -> list[StepAt]:
    """Return what a tier has to get and has not, the first to send first.

    What has begun is ended before anything else begins, then the newest goes first.
    """
    if not (settings := view.settings.lower.get(tier)):
        return []
    fresh = [each for each in catalog.steps if not each.is_stale]
    there = [each.at for each in fresh if tier in each.whole_tiers]
    is_full = settings.keep is not None and len(there) >= settings.keep
    oldest = there[: settings.keep][-1] if is_full else None
    able = [
        each.at
        for each in fresh
        if each.at not in there and _is_able(each, tier) and (oldest is None or each.at > oldest)
    ]
    begun = {each.at for each in view.sendings if each.tier == tier and each.node in view.living}
    begun |= {step_of(copy) for copy in of_namespace(view) if copy.tier == tier}
    wanted = [at for at in reversed(able) if at in begun]
    others = [at for at in able if at not in begun]
    wanted += _find_due(view, tier, settings.cadence, others, there)
    return wanted[: settings.waiting_max]


def of_namespace(view: View) -> list[Copy]:
    """Return the copies of a view's namespace, those of nodes that are gone included."""
    return [copy for copy in view.copies if copy.meta_id.namespace == view.namespace]


def _find_due(
    view: View, tier: LowerTier, cadence: Cadence, steps: Sequence[StepAt], there: Sequence[StepAt]
) -> list[StepAt]:
    """Return which of the steps, newest first, are due.

    With seconds it is the first step made after they have passed: it stays the same while
    later ones come.
    """
    if cadence.every_n_steps is not None:
        return [at for at in steps if at.step % cadence.every_n_steps == 0]
    every_s = cadence.every_s or 0.0
    begun_s = view.begun_s.get(tier)
    since_s = view.whole_since_s
    due = [
        at
        for at in steps
        if (not there or at > there[0])
        and (begun_s is None or since_s.get(at, view.now_s) >= begun_s + every_s)
    ]
    return due[-1:]


def _is_able(state: StepState, tier: LowerTier) -> bool:
    """Return whether memory has all that the tier lacks of a step."""
    return state.is_whole and all(
        any(copy.tier in ("ram", tier) for copy in held) for held in state.copies.values()
    )


def _is_settled(view: View, at: StepAt) -> bool:
    return view.now_s - view.whole_since_s.get(at, view.now_s) >= view.settings.settle_s


def _assign(view: View, tier: LowerTier, states: Iterable[StepState]) -> list[Upload]:
    """Give every digest that the tier lacks to one node, and every description to one.

    A node that is to let go of its copy sends nothing: those that keep it would send it again.
    """
    stored = {copy.digest for copy in of_namespace(view) if copy.tier == tier}
    needs: dict[str, list[tuple[Copy, ...]]] = defaultdict(list)
    for state in states:
        for held in state.copies.values():
            kept = tuple(copy for copy in held if copy.tier == "ram" and not copy.is_passing)
            if kept and not any(copy.tier == tier for copy in held):
                needs[held[0].digest].append(kept)
    uploads = []
    for digest, groups in needs.items():
        holders = {copy.place for held in groups for copy in held}
        sender = _pick(view, tier, digest, holders)
        by_node: dict[str, list[Copy]] = defaultdict(list)
        for held in groups:
            places = {copy.place for copy in held}
            node = sender if sender in places else _pick(view, tier, digest, places)
            if node == sender or digest in stored:
                by_node[node].append(held[0])
        for node, copies in sorted(by_node.items()):
            uploads.append(
                Upload(
                    tier=tier,
                    at=step_of(copies[0]),
                    digest=digest,
                    node=node,
                    shard_ids=tuple(copy.meta_id for copy in copies),
                )
            )
    return uploads


def _pick(view: View, tier: LowerTier, digest: str, holders: Collection[str]) -> str:
    """Return the holder that has begun to send, else the one that the digest ranks highest."""
    begun = [
        each.node
        for each in view.sendings
        if each.tier == tier and each.digest == digest and each.node in holders
    ]
    return min(begun) if begun else max(holders, key=lambda node: (mix(digest, node), node))
