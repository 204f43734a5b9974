"""Which shard a node sends to which peer next. Pure.

There is no queue: what is to be sent is computed anew from what is held here and there,
so that it never grows, and what is dropped meanwhile is not sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from resilience.tiered.placement import Node, choose_peers
from resilience.tiered.shard import ShardId

StepKey = tuple[str, int, int]
"""Namespace, step and generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A shard that this node holds."""

    id: ShardId
    digest: str
    origin: str
    """Name of the node that it was written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """What is known of another node."""

    node: Node
    is_living: bool
    """It is there, and has said what it holds."""
    is_awaited: bool
    """It may come yet: it is not known to be gone."""
    digests: Mapping[ShardId, str]
    """What it holds, and keeps."""
    dropped: Collection[ShardId]
    """What it held and has dropped, for a reason of its own."""
    passing: Collection[ShardId] = ()
    """What it holds only until others keep it instead."""


def choose_targets(
    own: Node, others: Sequence[Node], *, replicas: int, holds_instead: bool = False
) -> frozenset[str]:
    """Return who placement gives this node's shards to, of the nodes that are there.

    `holds_instead`: they hold them instead of this node.
    """
    chosen = choose_peers([own, *others], own.name, replicas, holds_instead=holds_instead)
    return frozenset(each.name for each in chosen)


def plan_pushes(
    own: str,
    held: Sequence[Held],
    peers: Sequence[PeerView],
    *,
    target: str,
    replicas: int,
    holds_instead: bool = False,
) -> list[Held]:
    """Return what this node has to send to a peer that is chosen, in no order.

    Each shard is to be on `replicas` further nodes. The node it was written to sends it;
    where that one is gone, or has lost it, the first by name of those that hold it. What
    a node has dropped is not sent to it again, and not sent at all if it was written there.
    With `holds_instead` the node it was written to lets go of it, so that one that holds it
    sends it on if another is gone; it never goes back.
    """
    there = [each for each in peers if each.is_living or each.is_awaited]
    receiver = next((each for each in there if each.node.name == target), None)
    if receiver is None or not receiver.is_living:
        return []
    return [
        each
        for each in held
        if each.id not in receiver.digests
        and each.id not in receiver.dropped
        and not (holds_instead and each.origin == target)
        and _is_missing(own, each, there, replicas - (holds_instead and each.origin != own))
    ]


def choose_next(
    waiting: Sequence[Held], current: StepKey | None, served: Mapping[str, int]
) -> Held | None:
    """Return what goes first; None where nothing waits.

    A step that is begun is finished, else no step ever is where steps come faster than
    they can be sent. Then comes the newest of the namespace that was served longest ago.
    """
    if not waiting:
        return None
    begun = [each for each in waiting if step_key(each.id) == current]
    if begun:
        return min(begun, key=lambda each: each.id)
    name = min(
        {each.id.namespace for each in waiting}, key=lambda each: (served.get(each, 0), each)
    )
    own = [each for each in waiting if each.id.namespace == name]
    newest = max(step_key(each.id) for each in own)
    return min((each for each in own if step_key(each.id) == newest), key=lambda each: each.id)


def step_key(shard_id: ShardId) -> StepKey:
    """Return which step of which namespace a shard belongs to."""
    return shard_id.namespace, shard_id.step, shard_id.generation


def _is_missing(own: str, shard: Held, peers: Sequence[PeerView], replicas: int) -> bool:
    """Return whether there are too few copies and this node is the one to make one."""
    living = [each for each in peers if each.is_living]
    holders = [each.node.name for each in living if each.digests.get(shard.id) == shard.digest]
    if len(holders) >= replicas:
        return False
    if shard.origin == own:
        return True
    origin = next((each for each in peers if each.node.name == shard.origin), None)
    if origin is not None and (
        not origin.is_living
        or shard.id in origin.dropped
        or shard.id in origin.passing
        or shard.origin in holders
    ):
        return False
    return own == min([own, *holders])
