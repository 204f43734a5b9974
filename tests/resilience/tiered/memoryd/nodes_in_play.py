"""Nodes that hold each other's shards, played with the plans alone: no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from resilience.tiered.catalog import Copy, StepAt, judge_steps, step_of
from resilience.tiered.memoryd.peer_plan import (
    Held,
    PeerView,
    choose_next,
    choose_targets,
    plan_pushes,
)
from resilience.tiered.placement import Node
from resilience.tiered.retention import plan_drops, plan_room
from resilience.tiered.shard import ShardId
from resilience.tiered.uploads import Settings, View
from tests.resilience.tiered.inventories import NAMESPACE, copy, shard_id

SHARD_BYTES = 10


@dataclass
class Member:
    """One node: what it holds, and what it knows of the others."""

    name: str
    copies: dict[ShardId, Copy] = field(default_factory=dict)
    origins: dict[ShardId, str] = field(default_factory=dict)
    known: dict[str, dict[ShardId, Copy]] = field(default_factory=dict)
    dropped: dict[str, set[ShardId]] = field(default_factory=dict)
    since_s: dict[StepAt, float] = field(default_factory=dict)
    complete: set[StepAt] = field(default_factory=set)


class Play:
    """A cluster in which anything may happen in any order."""

    def __init__(
        self, num_nodes: int, *, replicas: int, num_shards: int, budget_shards: int, keep: int = 1
    ) -> None:
        names = [f"n{number}" for number in range(num_nodes)]
        self.members = {name: Member(name) for name in names}
        self.isolated: set[str] = set()
        self.now_s = 0.0
        self.step = 0
        self.replicas = replicas
        self.settings = Settings(keep=keep, domains_min=1, keepers=replicas)
        self._num_shards = num_shards
        self._budget_bytes = budget_shards * SHARD_BYTES

    def save(self) -> bool:
        """Let each node write its shards of the next step; False where there was no room.

        A job does not get there without all its nodes.
        """
        if self.isolated:
            return False
        self.step += 1
        written = [self._write(member) for member in self.members.values()]
        return all(written)

    def tell(self, one: str, other: str) -> None:
        """Let a node know what another has, if they hear each other."""
        if other in self._heard(one):
            teller, member = self.members[one], self.members[other]
            before = {n for n, c in member.known.get(one, {}).items() if not c.is_passing}
            dropped = member.dropped.get(one, set()) | before
            member.dropped[one] = dropped - teller.copies.keys()
            member.known[one] = dict(teller.copies)
            member.complete |= teller.complete

    def push(self, one: str, other: str) -> bool:
        """Let a node tell, then send the next shard it has for another; says whether it did."""
        self.tell(one, other)
        sender, receiver = self.members[one], self.members[other]
        if other not in self._heard(one) or other not in sender.known:
            return False
        chosen = choose_next(self._waiting(sender, other), None, {})
        if chosen is None:
            return False
        if chosen.id not in receiver.copies and not self._has_room(receiver, 1):
            return False
        receiver.origins[chosen.id] = chosen.origin
        sent = replace(sender.copies[chosen.id], place=other, is_passing=False)
        receiver.copies[chosen.id] = sender.known[other][chosen.id] = sent
        return True

    def join(self, name: str) -> None:
        """Let a node hear the others again."""
        self.isolated.discard(name)
        self.tell_all()

    def wait(self, seconds: float) -> None:
        """Let time pass, in which those who hear each other are heard."""
        self.tell_all()
        self.now_s += seconds

    def tell_all(self) -> None:
        """Let all who hear each other know what they have."""
        for one in self.members:
            for other in self.members:
                if one != other:
                    self.tell(one, other)

    def keep(self, name: str) -> bool:
        """Let a node drop what it need not have; says whether it did."""
        member = self.members[name]
        plan = plan_drops(self.view(member))
        self._drop(member, (*plan.drops, *plan.passed))
        return bool(plan.drops or plan.passed)

    def lose(self, name: str) -> None:
        """Let a node come back with nothing."""
        self.members[name] = Member(name)
        for each in self.members.values():
            each.known.pop(name, None)
            each.dropped.pop(name, None)

    def settle(self) -> None:
        """Let all that can happen, happen."""
        is_busy = True
        while is_busy:
            is_busy = False
            for one in self.members:
                self.tell_all()
                is_busy |= self.keep(one)
                for other in self.members:
                    self.tell(other, one)
                    is_busy |= self.push(one, other)

    def whole_step(self) -> int:
        """Return the newest step of which all shards are somewhere."""
        copies = [each for member in self.members.values() for each in member.copies.values()]
        steps = judge_steps(copies, self._living(), namespace=NAMESPACE, domains_min=1).steps
        return max((each.at.step for each in steps if each.is_whole), default=0)

    def complete_step(self) -> int:
        """Return the newest step that those who are to keep it have."""
        copies = [each for member in self.members.values() for each in member.copies.values()]
        catalog = judge_steps(
            copies, self._living(), namespace=NAMESPACE, domains_min=1, keepers=self.replicas
        )
        return max((each.at.step for each in catalog.complete), default=0)

    def view(self, member: Member) -> View:
        """Return what a node knows."""
        heard = self._heard(member.name)
        copies = list(member.copies.values())
        for other in heard - {member.name}:
            copies += member.known.get(other, {}).values()
        living = {each: each for each in heard if each == member.name or each in member.known}
        for at in map(step_of, copies):
            member.since_s.setdefault(at, self.now_s)
        seen = judge_steps(
            copies, living, namespace=NAMESPACE, domains_min=1, keepers=self.replicas
        )
        member.complete |= {each.at for each in seen.complete}
        return View(
            namespace=NAMESPACE,
            own=member.name,
            settings=self.settings,
            copies=tuple(copies),
            living=living,
            now_s=self.now_s,
            since_s=dict(member.since_s),
            last_complete=max(member.complete & seen.states.keys(), default=None),
        )

    def _write(self, member: Member) -> bool:
        if not self._has_room(member, self._num_shards):
            return False
        total = len(self.members) * self._num_shards
        for number in range(self._num_shards):
            shard = f"{member.name}/{number}"
            written = copy(member.name, self.step, shard=shard, of=total, num_bytes=SHARD_BYTES)
            member.copies[shard_id(self.step, shard=shard)] = replace(written, is_passing=True)
        return True

    def _has_room(self, member: Member, num_shards: int) -> bool:
        free_bytes = self._budget_bytes - SHARD_BYTES * len(member.copies)
        plan = plan_room(
            [self.view(member)], needed_bytes=num_shards * SHARD_BYTES, free_bytes=free_bytes
        )
        self._drop(member, plan.drops)
        return plan.is_enough

    def _drop(self, member: Member, ids: tuple[ShardId, ...]) -> None:
        for each in ids:
            del member.copies[each]

    def _waiting(self, sender: Member, target: str) -> list[Held]:
        others = [_node(each) for each in self._heard(sender.name) - {sender.name}]
        if target not in choose_targets(
            _node(sender.name), others, replicas=self.replicas, holds_instead=True
        ):
            return []
        held = [
            Held(id=each, digest=own.digest, origin=sender.origins.get(each, sender.name))
            for each, own in sender.copies.items()
        ]
        peers = [
            PeerView(
                node=each,
                is_living=each.name in sender.known,
                is_awaited=True,
                digests={n: c.digest for n, c in known.items() if not c.is_passing},
                dropped=sender.dropped.get(each.name, ()),
                passing=[n for n, c in known.items() if c.is_passing],
            )
            for each in others
            for known in [sender.known.get(each.name, {})]
        ]
        return plan_pushes(
            sender.name, held, peers, target=target, replicas=self.replicas, holds_instead=True
        )

    def _heard(self, name: str) -> set[str]:
        """Return who is there for a node, itself included."""
        return {name} if name in self.isolated else set(self.members) - self.isolated

    def _living(self) -> dict[str, str]:
        return {each: each for each in self.members}


def _node(name: str) -> Node:
    return Node(name=name, domain=name)
