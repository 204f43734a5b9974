"""All that one daemon knows, in the form that the plans are made from.

The vault says what this node has, the peers what the others have, the shelf what the store
has. The board adds when something was first seen, and wakes whoever acts on it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import nlargest

from resilience.tiered.catalog import Catalog, Copy, LowerTier, StepAt, judge_steps, step_of
from resilience.tiered.memoryd.http_spaces import PREFIX as HTTP_PREFIX
from resilience.tiered.memoryd.peer_directory import Changes
from resilience.tiered.memoryd.peering import Peers, copy_in_memory
from resilience.tiered.memoryd.shelf import Clock, Shelf
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId
from resilience.tiered.uploads import Sending, Settings, View
from resilience.tiered.vault import Holding, Vault

_FLUSH = ""
"""Digest in a Sending that is of no shard, but of a whole step."""

RECENT_STEPS = 32
"""How many steps of the store plans are made with, beside those that it is to keep."""


@dataclass(slots=True)
class _History:
    """When the steps of a namespace were first seen."""

    since_s: dict[StepAt, float] = field(default_factory=dict)
    whole_since_s: dict[StepAt, float] = field(default_factory=dict)
    begun_s: dict[LowerTier, float] = field(default_factory=dict)
    stored: frozenset[StepAt] | None = None
    """Steps that the store has begun to get; None until it is listed."""
    firsts: dict[int, int] = field(default_factory=dict)
    """The first step that each generation made, where no newer one began as early."""
    complete: frozenset[StepAt] = frozenset()
    """Steps that are there and were complete once."""

    def see(self, steps: Iterable[StepAt], now_s: float) -> None:
        """Take note of the steps that there are now."""
        there = set(steps)
        self.since_s = {at: self.since_s.get(at, now_s) for at in there}
        for at in there:
            if any(number >= at.generation and step <= at.step
                   for number, step in self.firsts.items()):  # fmt: skip
                continue
            kept = {
                number: step
                for number, step in self.firsts.items()
                if number > at.generation or step < at.step
            }
            self.firsts = {**kept, at.generation: at.step}

    def see_whole(self, steps: Iterable[StepAt], now_s: float) -> None:
        """Take note of the steps that are whole now."""
        self.whole_since_s = {at: self.whole_since_s.get(at, now_s) for at in steps}

    def see_complete(self, steps: Iterable[StepAt]) -> None:
        """Take note of the steps that are complete now."""
        self.complete = (self.complete & self.since_s.keys()) | frozenset(steps)

    def see_stored(self, steps: frozenset[StepAt], tier: LowerTier, now_s: float) -> None:
        """Take note of what a store has, of other nodes' uploads, too."""
        if self.stored is not None and steps - self.stored:
            self.begun_s[tier] = now_s
        self.stored = steps

    def seen(self) -> frozenset[StepAt]:
        """Return what makes other steps stale, though it may be gone."""
        return frozenset(
            StepAt(step=step, generation=number) for number, step in self.firsts.items()
        )


class Uses:
    """Namespaces that are in use, on this node and as the others say. Thread-safe."""

    def __init__(self, vault: Vault, expire_s: float, clock: Clock) -> None:
        self._vault = vault
        self._expire_s = expire_s
        self._clock = clock
        self._lock = threading.Lock()
        self._used_s: dict[str, float] = {}
        self._start_s = clock()
        """When what is not in there counts as used: nobody knows of before."""
        self._used_there: dict[str, frozenset[str]] = {}

    def note_use(self, namespace: str) -> None:
        """Take note that somebody writes or reads in a namespace."""
        with self._lock:
            self._used_s[namespace] = self._clock()

    def own(self) -> list[str]:
        """Return the namespaces held here that are claimed, or were used lately, on this node."""
        names = {each.id.namespace for each in self._vault.metas()}
        with self._lock:
            # What is being written is not held yet.
            self._used_s = {
                name: at_s
                for name, at_s in self._used_s.items()
                if name in names or self._is_used(name)
            }
            return sorted(each for each in names if self._is_used(each))

    def hear(self, node: str, names: frozenset[str]) -> None:
        """Take note of what is in use on another node."""
        with self._lock:
            self._used_there[node] = names

    def _is_used(self, namespace: str) -> bool:
        """Return whether this node uses a namespace; the caller has the lock."""
        age_s = self._clock() - self._used_s.get(namespace, self._start_s)
        return age_s < self._expire_s or self._vault.is_claimed(namespace)

    def is_over(self, namespace: str, living: Mapping[str, str]) -> bool:
        """Return whether nobody uses a namespace."""
        with self._lock:
            there = (names for node, names in self._used_there.items() if node in living)
            return not self._is_used(namespace) and not any(namespace in each for each in there)


class Sendings:
    """Uploads under way, on this node and as the others say. Thread-safe."""

    def __init__(self, own: str, clock: Clock) -> None:
        self._own = own
        self._clock = clock
        self._lock = threading.Lock()
        self._here: set[tuple[str, Sending]] = set()
        """What this node is sending, with the namespaces."""
        self._there: dict[str, list[tuple[str, Sending]]] = {}
        self._flushed_s: dict[tuple[str, StepAt], float] = {}

    def begin(self, namespace: str, sending: Sending) -> None:
        """Take note of an upload of this node's."""
        with self._lock:
            self._here.add((namespace, sending))

    def end(self, namespace: str, sending: Sending) -> None:
        """Forget an upload."""
        with self._lock:
            self._here.discard((namespace, sending))

    def flush(self, namespace: str, at: StepAt, tier: LowerTier) -> None:
        """Count a step as being sent until the store has it."""
        sending = Sending(tier=tier, at=at, digest=_FLUSH, node=self._own)
        with self._lock:
            self._here.add((namespace, sending))
            self._flushed_s[namespace, at] = self._clock()

    def flushes(self) -> list[tuple[str, StepAt]]:
        """Return what was to be flushed here and is not in the store, as of the last views."""
        return [(name, each.at) for name, each in self.own() if each.digest == _FLUSH]

    def end_flushes(self, name: str, catalog: Catalog, seen_s: float) -> None:
        """Forget what is in the store by now, or gone.

        What was not there when somebody looked, at `seen_s`, may have come with the flush.
        """
        with self._lock:
            for each in [of for to, of in self._here if to == name and of.digest == _FLUSH]:
                state = catalog.states.get(each.at)
                if state is None:
                    is_over = self._flushed_s[name, each.at] < seen_s
                else:
                    is_over = state.is_stale or each.tier in state.whole_tiers
                if is_over:
                    del self._flushed_s[name, each.at]
                    self._here.discard((name, each))

    def own(self) -> list[tuple[str, Sending]]:
        """Return what this node is sending, with the namespaces."""
        with self._lock:
            return sorted(self._here)

    def hear(self, node: str, sendings: list[tuple[str, Sending]]) -> None:
        """Take note of what another node is sending; what it sent before is over."""
        with self._lock:
            self._there[node] = sendings

    def of(self, namespace: str, living: Mapping[str, str]) -> set[Sending]:
        """Return what living nodes are sending."""
        with self._lock:
            there = (of for node, of in self._there.items() if node in living)
            known = itertools.chain(self._here, *there)
            return {each for name, each in known if name == namespace}


class Board(Changes):
    """What one daemon knows. Any thread; asks nobody, so it never waits."""

    def __init__(
        self,
        vault: Vault,
        own: Node,
        settings: Settings,
        *,
        peers: Peers | None = None,
        shelf: Shelf | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__()
        self.vault = vault
        self.own = own
        self.settings = settings
        self.peers: Peers = peers or Peers()
        self.shelf = shelf
        self._clock = clock
        self._lock = threading.Lock()
        self._histories: dict[str, _History] = {}
        self.sendings = Sendings(own.name, clock)
        self.uses = Uses(vault, settings.expire_s, clock)
        self._fetched: Counter[ShardId] = Counter()

    def living(self) -> dict[str, str]:
        """Return the failure domain of each node that is there, this one included."""
        return {**self.peers.living(), self.own.name: self.own.domain}

    def copies(self, namespace: str, *, intact_only: bool = False) -> list[Copy]:
        """Return all copies of a namespace."""
        return [
            *self._own_copies(self.vault.holdings()).get(namespace, ()),
            *(each for each in self.peers.copies() if each.meta_id.namespace == namespace),
            *(self.shelf.copies(namespace, intact_only=intact_only) if self.shelf else ()),
        ]

    def views(self, *, by_segments: bool = False, with_http: bool = False) -> list[View]:
        """Return the view of each namespace that anybody has in memory.

        Those of the HTTP door only `with_http`: it keeps and drops by rules of its own. With
        `by_segments` an own copy counts what dropping it gives back now.
        """
        seen_s = self._clock()
        groups = self._own_copies(self.vault.holdings(), by_segments=by_segments)
        for each in self.peers.copies():
            groups[each.meta_id.namespace].append(each)
        living = self.living()
        with self._lock:
            for name in self._histories.keys() - groups.keys():
                if not self._is_stored(name):
                    del self._histories[name]
        before = self.complete()
        views = [self._view(name, groups[name], living, seen_s) for name in sorted(groups)]
        if self.complete() != before:
            self.peers.wake()
        return [each for each in views if with_http or not each.namespace.startswith(HTTP_PREFIX)]

    def is_empty(self) -> bool:
        """Return whether this node holds no shard."""
        views = self.views()
        return not any(
            copy.tier == "ram" and copy.place == self.own.name
            for view in views
            for copy in view.copies
        )

    def safe(self, namespace: str) -> set[ShardId]:
        """Return the shards that are in the memory of enough failure domains."""
        living = self.living()
        domains: defaultdict[ShardId, set[str]] = defaultdict(set)
        for each in self.copies(namespace):
            if each.tier == "ram" and each.place in living:
                domains[each.meta_id].add(living[each.place])
        wanted = min(self.settings.domains_min, len(set(living.values())))
        return {each for each, there in domains.items() if len(there) >= wanted}

    def seen(self, namespace: str) -> frozenset[StepAt]:
        """Return histories known to have been there."""
        with self._lock:
            history = self._histories.get(namespace)
            return self._begun(namespace) | (history.seen() if history else frozenset())

    def complete(self) -> dict[str, frozenset[StepAt]]:
        """Return by namespace the steps that are there and were complete once, as seen here."""
        with self._lock:
            return {
                name: history.complete
                for name, history in self._histories.items()
                if history.complete
            }

    def was_complete(self, namespace: str) -> frozenset[StepAt]:
        """Return the steps that this or another node has seen complete.

        Where a node is lost, copies are made anew; what was complete is no worse until then.
        """
        seen_there = self.peers.complete().get(namespace, frozenset())
        return self.complete().get(namespace, frozenset()) | seen_there

    def go_back(self, namespace: str, step: int, first_generation: int | None) -> int:
        """Note that a run goes on from a step; returns what its generations count from.

        Chosen here, that is more than any generation seen so far, and than one chosen by
        somebody who has seen more: it is the time in seconds, where clocks agree that much.
        Raises StaleError where a newer run has begun.
        """
        if first_generation is None:
            _, runs = self.vault.runs().get(namespace, (None, {}))
            known = {each.meta_id.generation for each in self.copies(namespace)} | set(runs)
            first_generation = max(int(time.time()), max(known, default=0) + 1)
        self.vault.begin_run(namespace, step=step, first_generation=first_generation)
        self.peers.wake()
        return first_generation

    def flush(self, namespace: str, at: StepAt) -> None:
        """Have a step sent to the store whatever its cadence says; a no-op without a store.

        All nodes hear of it as of an upload that has begun, which is ended before others.
        """
        if self.shelf is None:
            return
        self.sendings.flush(namespace, at, self.shelf.tier)
        self.wake()
        self.peers.wake()

    @contextmanager
    def sending(self, namespace: str, sending: Sending) -> Iterator[None]:
        """Count an upload as begun within the block."""
        with self._lock:
            history = self._histories.setdefault(namespace, _History())
            begun = history.stored or frozenset()
            if sending.at not in begun:
                history.begun_s[sending.tier] = self._clock()
                history.stored = begun | {sending.at}
        self.sendings.begin(namespace, sending)
        self.peers.wake()
        try:
            yield
        finally:
            self.sendings.end(namespace, sending)
            self.peers.wake()

    def is_sent_elsewhere(self, namespace: str, digest: str) -> bool:
        """Return whether another node sends this."""
        sendings = self.sendings.of(namespace, self.living())
        return any(each.digest == digest and each.node != self.own.name for each in sendings)

    @contextmanager
    def fetched(self, shard_id: ShardId) -> Iterator[None]:
        """Let nobody drop a shard within the block, in which somebody gets it to read it."""
        with self._lock:
            self._fetched[shard_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._fetched[shard_id] -= 1
                self._fetched += Counter()
            self.wake()

    def drop(self, shard_ids: Iterable[ShardId]) -> int:
        """Drop shards, except those that somebody is getting; returns how many went."""
        with self._lock:
            ids = [each for each in shard_ids if each not in self._fetched]
        return sum([self.vault.drop(each) for each in ids])

    def pass_on(self, shard_ids: Collection[ShardId]) -> bool:
        """Drop shards that others keep now; says whether all went: who is read here stays.

        Else each reader here would get it anew.
        """
        pinned = {each.meta.id for each in self.vault.holdings() if each.is_pinned}
        return self.drop([each for each in shard_ids if each not in pinned]) == len(shard_ids)

    def rest_s(self, views: Iterable[View]) -> float | None:
        """Return when time alone changes a plan; None where it does not."""
        now_s = self._clock()
        ends = [
            since_s + view.settings.settle_s
            for view in views
            for since_s in view.whole_since_s.values()
        ]
        return min((end - now_s for end in ends if end > now_s), default=None)

    def _view(
        self, name: str, copies: Sequence[Copy], living: Mapping[str, str], seen_s: float
    ) -> View:
        now_s = self._clock()
        stored, damaged = self._stored(name, copies)
        known = (*copies, *stored)
        seen_there = self.peers.complete().get(name, frozenset())
        with self._lock:
            history = self._histories.setdefault(name, _History())
            history.see(map(step_of, known), now_s)
            seen = history.seen() | self._begun(name)
            catalog = judge_steps(
                known, living, namespace=name,
                domains_min=self.settings.domains_min, seen=seen,
                keepers=self.settings.keepers,
            )  # fmt: skip
            history.see_whole((each.at for each in catalog.steps if each.is_whole), now_s)
            history.see_complete(each.at for each in catalog.complete)
            self.sendings.end_flushes(name, catalog, seen_s)
            if self.shelf and self.shelf.is_listed(name):
                sent = {each.at for each in self.sendings.of(name, living)}
                steps = frozenset({*map(step_of, stored), *sent})
                history.see_stored(steps, self.shelf.tier, now_s)
            return View(
                namespace=name,
                own=self.own.name,
                settings=self.settings,
                copies=known,
                living=living,
                now_s=now_s,
                since_s=dict(history.since_s),
                whole_since_s=dict(history.whole_since_s),
                begun_s=dict(history.begun_s),
                sendings=tuple(sorted(self.sendings.of(name, living))),
                seen=seen,
                is_over=self.uses.is_over(name, living),
                last_complete=max(
                    (
                        each.at
                        for each in catalog.steps
                        if each.at in history.complete | seen_there and not each.is_stale
                    ),
                    default=None,
                ),
                damaged=tuple(damaged),
            )

    def _begun(self, namespace: str) -> frozenset[StepAt]:
        """Return the first step that each run may have made."""
        _, runs = self.vault.runs().get(namespace, (None, {}))
        return frozenset(StepAt(step=after + 1, generation=first) for first, after in runs.items())

    def _own_copies(
        self, holdings: Iterable[Holding], *, by_segments: bool = False
    ) -> defaultdict[str, list[Copy]]:
        copies: defaultdict[str, list[Copy]] = defaultdict(list)
        for each in holdings:
            is_passing = self.peers.is_passing(each.meta.id)
            copy = copy_in_memory(each, self.own.name, is_passing=is_passing)
            if by_segments:
                copy = replace(copy, num_bytes=0 if each.is_pinned else each.segment_bytes)
            copies[each.meta.id.namespace].append(copy)
        return copies

    def _stored(self, name: str, held: Iterable[Copy]) -> tuple[list[Copy], list[Copy]]:
        """Return what the store has of the newest steps, and of those in memory; and what is bad.

        Plans are made after each change: older steps must not make them slow. What was found
        damaged is told apart, so that it is sent again where anybody has it.
        """
        stored, damaged = self.shelf.judged(name) if self.shelf else ([], [])
        keep = max((each.keep or 0 for each in self.settings.lower.values()), default=0)
        steps = set(nlargest(RECENT_STEPS + keep, set(map(step_of, stored))))
        steps.update(map(step_of, held))
        return [each for each in stored if step_of(each) in steps], damaged

    def _is_stored(self, namespace: str) -> bool:
        return bool(self.shelf and self.shelf.copies(namespace))
