"""A lower tier as one daemon sees it: what it holds, and whether it answers.

A listing is made in a thread of its own, once for all who ask meanwhile, and shows what
it has found so far, the newest steps first. Whoever waits for it waits as long as it likes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

from resilience.agent.evidence.life import find_life
from resilience.tiered.catalog import Copy, LowerTier, StepAt, step_of
from resilience.tiered.errors import RefusedError, TierError
from resilience.tiered.memoryd.output import complain
from resilience.tiered.shard import ShardId, ShardMeta, content_digest
from resilience.tiered.stores.entries import EntryReader
from resilience.tiered.stores.owner import NamespaceOwner
from resilience.tiered.stores.store import Store

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0

_PUT_MAX = 1024
"""Of so many shards that it has put this node tells the others."""

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class _Look:
    """A listing that is being made."""

    is_over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    has_news: bool = False
    changed: set[ShardId] = field(default_factory=set)
    """What was put or deleted meanwhile: of that the listing knows less."""


@dataclass(slots=True)
class _Known:
    """What is known of a namespace in the store."""

    copies: dict[ShardId, Copy] = field(default_factory=dict)
    is_listed: bool = False


class Shelf:
    """One store. Any thread; only `look` waits for the store."""

    def __init__(
        self, store: Store, tier: LowerTier, place: str, *, clock: Clock = time.monotonic
    ) -> None:
        self.store = store
        self.tier: LowerTier = tier
        self.place = place
        """Name of the bucket or folder."""
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._looks: dict[str, _Look] = {}
        self._bad: set[tuple[str, str]] = set()
        self._bad_there: dict[str, set[tuple[str, str]]] = {}
        """What other nodes have found damaged."""
        self._mended: set[tuple[str, str]] = set()
        """What was sent again since; not all who found it damaged know that yet."""
        self._put_here: dict[ShardId, tuple[int, Copy]] = {}
        self._heard: dict[str, int] = {}
        """The number of the last put that each other node has told."""
        self._error = ""
        self._failing_since_s: float | None = None
        self._retry_s = 0.0
        self._num_failures = 0
        self._owners: dict[str, NamespaceOwner] = {}
        """By namespace, the run that was said here to have it."""
        self._takes_nothing = False
        self._trial: str | None = None
        self._asked_s: float | None = None
        """Since when the store has done nothing of what it is asked for."""

    @property
    def name(self) -> str:
        """Return the store's name for a person."""
        return f"{self.tier}:{self.place}"

    def copies(self, namespace: str, *, intact_only: bool = False) -> list[Copy]:
        """Return what the store is known to hold; as `intact_only` without what was read bad."""
        with self._lock:
            known = self._known.get(namespace)
            return [
                each
                for each in (known.copies.values() if known else ())
                if not intact_only or not self._is_bad(namespace, each.digest)
            ]

    def judged(self, namespace: str) -> tuple[list[Copy], list[Copy]]:
        """Return what the store is known to hold at one moment: what is intact, and what is not."""
        with self._lock:
            known = self._known.get(namespace)
            copies = list(known.copies.values()) if known else []
            bad = [each for each in copies if self._is_bad(namespace, each.digest)]
        gone = set(bad)
        return [each for each in copies if each not in gone], bad

    def is_listed(self, namespace: str) -> bool:
        """Return whether all that the store held at some moment is known."""
        with self._lock:
            return namespace in self._known and self._known[namespace].is_listed

    def listed(self) -> set[str]:
        """Return the namespaces of which all is known that the store held at some moment."""
        with self._lock:
            return {name for name, each in self._known.items() if each.is_listed}

    def look(self, namespace: str, *, timeout_s: float) -> None:
        """Wait until the store is listed anew; TierError where it fails or takes longer."""
        with self._lock:
            look = self._looks.get(namespace)
            if look is None:
                look = _Look()
                thread = threading.Thread(
                    target=self._list, args=(namespace, look), name="store-listing", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the system has no more of them
                    raise TierError(f"{self.name} cannot be listed: {error}") from error
                self._looks[namespace] = look
        if not look.is_over.wait(timeout_s):
            raise TierError(f"{self.name} is not listed within {timeout_s:g} s")
        if look.error is not None:
            raise TierError(f"{self.name}: {look.error}") from look.error

    def note(self, meta: ShardMeta) -> None:
        """Take note of a shard that was put, by this node."""
        copy = self._copy(meta)
        with self._lock:
            self._put_here.pop(meta.id, None)
            # Later ones have higher numbers, those of a later life of this daemon, too.
            self._put_here[meta.id] = (time.time_ns(), copy)
            while len(self._put_here) > _PUT_MAX:
                del self._put_here[next(iter(self._put_here))]
            self._learn_of(copy)
        self.on_change()

    def put_here(self) -> list[tuple[int, Copy]]:
        """Return what this node has put lately, each with a number that grows."""
        with self._lock:
            return list(self._put_here.values())

    def found_bad(self) -> list[tuple[str, str]]:
        """Return namespace and digest of what this node has read and found damaged."""
        with self._lock:
            return sorted(self._bad)

    def hear(
        self, node: str, stored: Iterable[tuple[int, Copy]], bad: set[tuple[str, str]]
    ) -> None:
        """Take note of what another node has put lately, and of what it found damaged."""
        with self._lock:
            before = self._bad_there.get(node, set())
            self._mended -= before - bad
            self._bad_there[node] = bad
            last = self._heard.get(node, 0)
            for number, copy in stored:
                if number > last:
                    self._learn_of(replace(copy, place=self.place, tier=self.tier))
                    self._heard[node] = max(number, self._heard.get(node, 0))
        self.on_change()

    def forget(self, namespace: str, at: StepAt) -> None:
        """Take note of a step that was deleted."""
        with self._lock:
            known = self._known.setdefault(namespace, _Known())
            for each in [each for each in known.copies.values() if step_of(each) == at]:
                del known.copies[each.meta_id]
                self._put_here.pop(each.meta_id, None)
                self._touch(each.meta_id)
        self.on_change()

    def mark_bad(self, copy: Copy) -> None:
        """Take note that the bytes are not what they should be; readers get them no more."""
        self.mark_lost(copy.meta_id.namespace, [copy.digest])

    def mark_lost(self, namespace: str, digests: Iterable[str]) -> None:
        """Take note that there are no such bytes, or not intact, whatever anybody has put."""
        keys = {(namespace, each) for each in digests}
        with self._lock:
            self._bad |= keys
            self._mended -= keys
        self.on_change()

    def is_bad(self, namespace: str, digest: str) -> bool:
        """Return whether somebody has found this damaged, and nobody has sent it again since."""
        with self._lock:
            return self._is_bad(namespace, digest)

    def fail(self, error: BaseException, *, takes_nothing: bool = False) -> float:
        """Take note of an error; returns after how many seconds to try again.

        A store that `takes_nothing` fails until it has taken something, whatever it answers else.
        """
        with self._lock:
            self._error = str(error)
            self._takes_nothing |= takes_nothing
            if self._failing_since_s is None:
                self._failing_since_s = self._clock()
            pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0**self._num_failures)
            self._num_failures = min(self._num_failures + 1, 32)
            self._retry_s = self._clock() + pause_s
        self.on_change()
        return pause_s

    def succeed(self, *, has_taken: bool = False) -> None:
        """Take note that the store does what it is asked for, or `has_taken` what it was sent."""
        with self._lock:
            if self._takes_nothing and not has_taken:
                return
            self._takes_nothing = False
            was_failing = self._failing_since_s is not None
            self._failing_since_s = None
            self._retry_s = 0.0
            self._num_failures = 0
        if was_failing:
            self.on_change()

    def claim(self, namespace: str, owner: NamespaceOwner, *, takes_over: bool) -> list[str]:
        """Have a namespace be a run's own; returns by name whom it was taken from unseen.

        Raises RefusedError that names the run that has it, and by what that one is seen to live.
        """
        signs: dict[NamespaceOwner, str | None] = {}

        def lives(other: NamespaceOwner) -> bool:
            signs[other] = find_life(other.folder, other.run)
            return bool(signs[other])

        if others := self.store.claim(namespace, owner, takes_over=takes_over, lives=lives):
            names = ", ".join(each.describe(signs.get(each)) for each in others)
            raise RefusedError(
                f"the namespace {namespace!r} of the store {self.name} belongs to {names}"
            )
        with self._lock:
            self._owners[namespace] = owner
        return [each.describe() for each, sign in signs.items() if sign is None]

    def remember(self, owners: Mapping[str, NamespaceOwner]) -> None:
        """Take over what was said to an earlier daemon of this node: whose namespaces are."""
        with self._lock:
            self._owners.update(owners)

    def check_owner(self, namespace: str) -> None:
        """Raise TierError where a namespace that was claimed here is another run's by now.

        One that is nobody's any more, as its store was emptied, is claimed again.
        """
        with self._lock:
            owner = self._owners.get(namespace)
        if owner is None:
            return
        try:
            self.claim(namespace, owner, takes_over=False)
        except RefusedError as error:
            raise TierError(str(error)) from error

    def try_out(self) -> None:
        """Find out whether the store takes, gives and deletes; `trial` then says it."""
        words = ""
        try:
            with self.asked():
                self.store.try_out()
        except Exception as error:  # noqa: BLE001 - a store never ends the daemon
            complain(f"the store {self.name} cannot be used: {error}")
            words = str(error)
            self.fail(error, takes_nothing=True)
        with self._lock:
            self._trial = words
        self.on_change()

    @property
    def trial(self) -> str | None:
        """Return what was wrong with the store at the start, nothing or the store's own words.

        None as long as it is not known.
        """
        with self._lock:
            return self._trial

    @property
    def failure(self) -> str:
        """Return the store's own words where it fails, else nothing."""
        with self._lock:
            return self._error if self._failing_since_s is not None else ""

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Count the store as asked for something within the block; for one thread."""
        with self._lock:
            self._asked_s = self._clock()
        self.on_change()
        try:
            yield
        finally:
            with self._lock:
                self._asked_s = None

    def get_on(self) -> None:
        """Take note that the store has done a part of what it is asked for."""
        with self._lock:
            if self._asked_s is not None:
                self._asked_s = self._clock()

    @property
    def stalled_s(self) -> float | None:
        """Return for how long the store has done nothing of what it is asked for, None: nothing."""
        with self._lock:
            return None if self._asked_s is None else self._clock() - self._asked_s

    def pause_s(self) -> float:
        """Return for how long the store is left alone after an error."""
        with self._lock:
            return max(0.0, self._retry_s - self._clock())

    def describe(self) -> dict[str, Any]:
        """Return how the store does, as JSON data."""
        with self._lock:
            since_s = self._failing_since_s
            return {
                "name": self.name,
                "last_error": self._error or None,
                "failing_s": None if since_s is None else self._clock() - since_s,
                "stalled_s": None if self._asked_s is None else self._clock() - self._asked_s,
                "num_bad": len({*self._bad, *chain(*self._bad_there.values())} - self._mended),
            }

    def _list(self, namespace: str, look: _Look) -> None:
        """List a namespace; in a thread of its own."""
        try:
            ids = self.store.list_steps(namespace)
            self._keep_only(namespace, ids, look)
            self._learn(namespace, ids, look)
            with self._lock:
                look.has_news |= not self._known[namespace].is_listed
                self._known[namespace].is_listed = True
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            look.error = error
        with self._lock:
            del self._looks[namespace]
        look.is_over.set()
        if look.has_news:
            self.on_change()

    def _keep_only(self, namespace: str, ids: Iterable[ShardId], look: _Look) -> None:
        with self._lock:
            known = self._known.setdefault(namespace, _Known())
            for each in known.copies.keys() - set(ids) - look.changed:
                del known.copies[each]
                look.has_news = True

    def _learn(self, namespace: str, ids: Iterable[ShardId], look: _Look) -> None:
        """Read the entries that are new, the newest step first."""
        entries = EntryReader(self.store, self._leave_out)

        def step(each: ShardId) -> tuple[int, int]:
            return each.step, each.generation

        for _, group in groupby(sorted(ids, key=step, reverse=True), key=step):
            for each in group:
                if self._knows(each):
                    continue
                meta = entries.read(each)
                if meta is not None:
                    self._add(namespace, meta, look)

    def _knows(self, shard_id: ShardId) -> bool:
        with self._lock:
            return shard_id in self._known[shard_id.namespace].copies

    def _add(self, namespace: str, meta: ShardMeta, look: _Look) -> None:
        copy = self._copy(meta)
        with self._lock:
            if meta.id not in look.changed:
                self._known[namespace].copies[meta.id] = copy
                look.has_news = True

    def _leave_out(self, _: ShardId, error: TierError) -> None:
        complain(f"left out in {self.name}: {error}")
        self._note_error(error)

    def _note_error(self, error: TierError) -> None:
        with self._lock:
            self._error = str(error)

    def _is_bad(self, namespace: str, digest: str) -> bool:
        key = (namespace, digest)
        there = (key in each for each in self._bad_there.values())
        return key not in self._mended and (key in self._bad or any(there))

    def _learn_of(self, copy: Copy) -> None:
        """Take note of what was put just now, so that it is intact; the caller has the lock."""
        key = (copy.meta_id.namespace, copy.digest)
        if self._is_bad(*key):
            self._bad.discard(key)
            self._mended.add(key)
        self._known.setdefault(copy.meta_id.namespace, _Known()).copies[copy.meta_id] = copy
        self._touch(copy.meta_id)

    def _touch(self, shard_id: ShardId) -> None:
        """Tell a listing under way to leave a shard alone; the caller has the lock."""
        if look := self._looks.get(shard_id.namespace):
            look.changed.add(shard_id)

    def _copy(self, meta: ShardMeta) -> Copy:
        return Copy(
            meta_id=meta.id,
            num_shards=meta.num_shards,
            digest=content_digest(meta),
            num_bytes=meta.num_bytes,
            place=self.place,
            tier=self.tier,
        )
