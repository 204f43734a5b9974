"""What a daemon knows of the others: who is there, and what each one holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from resilience.tiered.catalog import Copy, StepAt
from resilience.tiered.errors import RefusedError
from resilience.tiered.memoryd.peer_plan import PeerView
from resilience.tiered.placement import Node
from resilience.tiered.shard import ShardId

COPIES_MAX = 1 << 18
"""A node that says it holds more shards is not believed."""

_TICK_S = 0.05


@dataclass(slots=True, eq=False)
class _Peer:
    """One other node; guarded by the directory's lock."""

    node: Node
    is_domain_known: bool
    boot: str = ""
    """Which life of that daemon has spoken last."""
    session: object | None = None
    """The connection from it that counts: the newest."""
    heard_s: float | None = None
    is_ended: bool = False
    """It has said that it ends."""
    num_busy: int = 0
    """Requests of it that are being worked on: it is waiting for this node."""
    has_inventory: bool = False
    was_heard: bool = False
    """It has said once what it holds, in this or an earlier life of its own."""
    version: int = 0
    """Grows whenever it says that it holds something else."""
    copies: dict[ShardId, Copy] = field(default_factory=dict)
    incoming: dict[ShardId, Copy] = field(default_factory=dict)
    """What has come of a new inventory that is not whole yet."""
    jobs: dict[str, str] = field(default_factory=dict)
    complete: Mapping[str, frozenset[StepAt]] = field(default_factory=dict)
    """The steps that it has seen complete."""
    dropped: set[ShardId] = field(default_factory=set)

    def enter(self, node: Node, boot: str, session: object) -> None:
        """Let the newest connection count."""
        if self.boot != boot:
            # Another life: what it lacks now was lost, not dropped.
            self.boot, self.dropped = boot, set()
            self.copies, self.complete, self.has_inventory = {}, {}, False
        self.session, self.incoming, self.is_ended = session, {}, False
        self.node = replace(
            node,
            domain=self.node.domain if self.is_domain_known else node.domain or node.name,
            switch=self.node.switch or node.switch,
            address=node.address or self.node.address,
        )

    def take(self, copies: Sequence[Copy], *, is_first: bool, is_last: bool) -> None:
        """Take a part of a whole inventory."""
        if is_first:
            self.incoming = {}
        self.incoming.update((each.meta_id, each) for each in copies)
        _limit(self.incoming)
        if is_last:
            if self.has_inventory:
                gone = self.copies.keys() - self.incoming.keys()
                self.dropped |= {each for each in gone if not self.copies[each].is_passing}
            self.copies, self.incoming = self.incoming, {}
            self.dropped -= self.copies.keys()
            self.has_inventory = self.was_heard = True
            self.version += 1

    def change(self, new: Sequence[Copy], gone: Sequence[ShardId]) -> None:
        """Take what it holds more and less than before."""
        for each in gone:
            copy = self.copies.pop(each, None)
            # What was only passing, it takes again.
            if copy is None or not copy.is_passing:
                self.dropped.add(each)
        for copy in new:
            self.copies[copy.meta_id] = copy
            self.dropped.discard(copy.meta_id)
        _limit(self.copies)
        _limit(self.dropped)
        self.version += 1


class Changes:
    """Counts what changes on this node, at others and in who is there, and wakes who waits."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self._condition = threading.Condition(lock)
        self._own_condition = threading.Condition(lock)
        """For those whom it does not concern what others hold."""
        self._num_changes = self._num_own = self._num_there = 0

    @property
    def version(self) -> int:
        """Return what `wait` compares with."""
        return self._num_changes

    @property
    def own_changes(self) -> tuple[int, int]:
        """Return how often this node has changed, and how often who is there."""
        return self._num_own, self._num_there

    def wake(self) -> None:
        """Wake who waits, all of them: something has changed on this node."""
        with self._condition:
            self._num_own += 1
            self._num_changes += 1
            self._own_condition.notify_all()
            self._condition.notify_all()

    def stir(self) -> None:
        """Wake who waits for others: a link has told what it had to, or cannot."""
        with self._condition:
            self._num_changes += 1
            self._condition.notify_all()

    def wait(self, seen: int, timeout_s: float | None) -> int:
        """Block until there are other than `seen` changes, or the time is over; says how many."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_changes != seen, timeout_s)
            return self._num_changes

    def wait_own(self, seen: tuple[int, int], timeout_s: float) -> tuple[int, int]:
        """Wait as `wait` does, but not for what others hold; returns `own_changes`."""
        with self._condition:
            self._own_condition.wait_for(lambda: self.own_changes != seen, timeout_s)
            return self.own_changes


class Directory(Changes):
    """All other nodes, whose silence for `gone_s` means that they are gone. Thread-safe.

    A node that was never heard of is awaited for as long, from the start on. `on_change`
    is called with no lock held when copies or living nodes have changed.
    """

    def __init__(
        self,
        peers: Sequence[Node],
        *,
        gone_s: float,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gone_s = gone_s
        self._clock = clock
        self._on_change = on_change
        super().__init__()
        self._is_closed = False
        self._start_s = clock()
        self._was_there: tuple[tuple[bool, bool, Node], ...] = ()
        self._peers = {each.name: _make_peer(each, None) for each in peers}

    def add(self, node: Node) -> None:
        """Take note of a node that nobody told of at the start, once; it is awaited from now on."""
        with self._condition:
            self._peers.setdefault(node.name, _make_peer(node, self._clock()))
        self.notify()

    def find(self, name: str) -> Node | None:
        """Return a node that is known here, a gone one too."""
        peer = self._peers.get(name)
        return peer.node if peer else None

    def enter(self, node: Node, boot: str, session: object) -> None:
        """Let a node's newest connection count; raises RefusedError for an unknown name.

        With an address it listens there now, wherever it did before.
        """
        with self._condition:
            peer = self._peers.get(node.name)
            if peer is None:
                raise RefusedError(
                    f"node {node.name!r:.80} is none of the peers that are known here"
                )
            peer.enter(node, boot, session)
            peer.heard_s = self._clock()
        self.notify()

    def leave(self, name: str, session: object, *, is_end: bool) -> None:
        """Note that a connection has ended; with `is_end`, because that daemon has.

        It may be started again, so it is awaited like one that is silent.
        """
        with self._condition:
            peer = self._peers[name]
            if peer.session is session:
                peer.session = None
                peer.is_ended = is_end
        self.notify()

    def hear(self, name: str) -> None:
        """Note that a node is there."""
        self._peers[name].heard_s = self._clock()

    def check_session(self, name: str) -> None:
        """Raise RefusedError where no connection of a node counts, so that it connects anew.

        One that came after this one has ended: the node would stay unseen until it has news.
        """
        if self._peers[name].session is None:
            raise RefusedError("no connection of this node counts any more")

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Let a node count as there within the block: it waits for this one."""
        peer = self._peers[name]
        with self._condition:
            peer.num_busy += 1
        try:
            yield
        finally:
            with self._condition:
                peer.num_busy -= 1
                peer.heard_s = self._clock()

    def take(
        self, name: str, session: object, copies: Sequence[Copy], *, is_first: bool, is_last: bool
    ) -> None:
        """Take a part of a whole inventory; it counts when the last part is there."""
        with self._condition:
            self._own(name, session).take(copies, is_first=is_first, is_last=is_last)
        self.notify()

    def change(
        self, name: str, session: object, new: Sequence[Copy], gone: Sequence[ShardId]
    ) -> None:
        """Take what a node holds more and less than before."""
        with self._condition:
            self._own(name, session).change(new, gone)
        self._tell_held()

    def lose(self, name: str, lost: Sequence[ShardId]) -> None:
        """Take note that a node has dropped shards as they were damaged: it may have them again."""
        with self._condition:
            self._peers[name].dropped.difference_update(lost)
        if lost:
            self._tell_held()

    def note_jobs(self, name: str, jobs: Mapping[str, str]) -> None:
        """Take note of whose a node's namespaces are."""
        with self._condition:
            peer = self._peers[name]
            named = {each.namespace for each in peer.copies} | jobs.keys()
            peer.jobs = {each: job for each, job in {**peer.jobs, **jobs}.items() if each in named}

    def note_complete(
        self, name: str, session: object, complete: Mapping[str, frozenset[StepAt]]
    ) -> None:
        """Take note of the steps that a node has seen complete."""
        with self._condition:
            self._own(name, session).complete = complete

    def note_copy(self, name: str, copy: Copy, version: int) -> None:
        """Take note of a copy that was just sent there; the node itself will say so, too.

        Unless it has said something since `version`: that may be that the copy is gone again.
        """
        with self._condition:
            peer = self._peers[name]
            known = peer.copies.get(copy.meta_id)
            if peer.version == version and (known is None or known.is_passing):
                peer.copies[copy.meta_id] = copy
        self._tell_held()

    def forget_dropped(self, held: Sequence[ShardId]) -> None:
        """Forget what others have dropped and this node does not hold either."""
        with self._condition:
            for peer in self._peers.values():
                if peer.dropped:
                    peer.dropped &= set(held)

    def version_of(self, name: str) -> int:
        """Return a number that grows with each change of what a node holds."""
        return self._peers[name].version

    def living(self) -> dict[str, str]:
        """Return the failure domain of each node that is there."""
        with self._condition:
            return {
                name: peer.node.domain
                for name, peer in self._peers.items()
                if self._is_living(peer)
            }

    def copies(self, jobs: Mapping[str, str]) -> list[Copy]:
        """Return what living nodes hold; not what belongs to another job than `jobs` says."""
        with self._condition:
            return [
                copy
                for peer in self._peers.values()
                if self._is_living(peer)
                for copy in _of_jobs(peer, jobs)
            ]

    def complete(self) -> dict[str, frozenset[StepAt]]:
        """Return by namespace the steps that living nodes have seen complete."""
        found: dict[str, frozenset[StepAt]] = {}
        with self._condition:
            for peer in self._peers.values():
                for name, steps in peer.complete.items() if self._is_living(peer) else ():
                    found[name] = found.get(name, frozenset()) | steps
        return found

    def unheard(self) -> list[str]:
        """Return the nodes that have never said what they hold."""
        with self._condition:
            return [name for name, peer in self._peers.items() if not peer.was_heard]

    def missing(self) -> list[str]:
        """Return the nodes that are not there now, or have not said yet what they hold."""
        with self._condition:
            return [name for name, peer in self._peers.items() if not self._is_living(peer)]

    def nodes(self) -> list[Node]:
        """Return the nodes that are there, or may come yet."""
        with self._condition:
            return [each.node for each in self._peers.values() if self._is_awaited(each)]

    def views(self, jobs: Mapping[str, str]) -> list[PeerView]:
        """Return what is known of each node, as it is now."""
        with self._condition:
            return [
                PeerView(
                    node=peer.node,
                    is_living=self._is_living(peer),
                    is_awaited=self._is_awaited(peer),
                    digests={
                        each.meta_id: each.digest
                        for each in _of_jobs(peer, jobs)
                        if not each.is_passing
                    },
                    dropped=frozenset(peer.dropped),
                    passing=frozenset(
                        each.meta_id for each in _of_jobs(peer, jobs) if each.is_passing
                    ),
                )
                for peer in self._peers.values()
            ]

    def notify(self) -> None:
        """Wake who waits, and tell who wants to know."""
        with self._condition:
            self._num_changes += 1
            if (there := self._there()) != self._was_there:
                self._was_there = there
                self._num_there += 1
                self._own_condition.notify_all()
            self._condition.notify_all()
        self._on_change()

    def _tell_held(self) -> None:
        """Notify where others hold something else, and who is there is not touched."""
        self.stir()
        self._on_change()

    def look(self) -> None:
        """Notify if time alone has changed who is there."""
        with self._condition:
            is_same = self._there() == self._was_there
        if not is_same:
            self.notify()

    def wait_known(self, timeout_s: float | None = None) -> bool:
        """Block until each node that is awaited has said what it holds; for `gone_s` at most.

        Says whether it is so: False only where `timeout_s` is shorter than that.
        """
        with self._condition:
            limit_s = self._gone_s if timeout_s is None else timeout_s
            end_s = self._clock() + limit_s
            while (
                not self._is_closed
                and (rest_s := end_s - self._clock()) > 0
                and (unknown := self._unknown())
            ):
                gone_s = [(each.heard_s or self._start_s) + self._gone_s for each in unknown]
                # A little longer, since the clock and the wait need not agree.
                self._condition.wait(min(rest_s, max(gone_s) - self._clock() + _TICK_S))
            return limit_s >= self._gone_s or not self._unknown()

    def close(self) -> None:
        """Let nobody wait any more for what others say."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _unknown(self) -> list[_Peer]:
        return [
            each
            for each in self._peers.values()
            if not each.has_inventory and not each.is_ended and self._is_awaited(each)
        ]

    def _own(self, name: str, session: object) -> _Peer:
        peer = self._peers[name]
        if peer.session is not session:
            raise RefusedError("a newer connection of this node counts")
        return peer

    def _there(self) -> tuple[tuple[bool, bool, Node], ...]:
        return tuple(
            (self._is_living(each), self._is_awaited(each), each.node)
            for each in self._peers.values()
        )

    def _is_heard(self, peer: _Peer) -> bool:
        if peer.heard_s is None:
            return False
        return bool(peer.num_busy) or self._clock() - peer.heard_s < self._gone_s

    def _is_awaited(self, peer: _Peer) -> bool:
        is_early = self._clock() - self._start_s < self._gone_s
        return self._is_heard(peer) or (peer.heard_s is None and is_early)

    def _is_living(self, peer: _Peer) -> bool:
        return peer.has_inventory and not peer.is_ended and self._is_heard(peer)


def _make_peer(node: Node, heard_s: float | None) -> _Peer:
    named = replace(node, domain=node.domain or node.name)
    return _Peer(node=named, is_domain_known=bool(node.domain), heard_s=heard_s)


def _of_jobs(peer: _Peer, jobs: Mapping[str, str]) -> Iterator[Copy]:
    for copy in peer.copies.values():
        name = copy.meta_id.namespace
        if peer.jobs.get(name, jobs.get(name)) == jobs.get(name, peer.jobs.get(name)):
            yield copy


def _limit(items: Mapping[ShardId, Copy] | set[ShardId]) -> None:
    if len(items) > COPIES_MAX:
        raise ValueError(f"more than {COPIES_MAX} shards")
