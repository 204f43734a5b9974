"""Which peers a node's shards are copied to. Pure.

Every node computes the same from the same nodes, in any order. Each kind of peer is a
matching: every node has one and is the one of exactly one other, so that each receives
as many as it gives. Pairs are taken in an order mixed from their names, so that a node
that leaves or comes moves few of the others.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

Cost = Callable[[int, int], int]
"""What is against a pair of giver and receiver: the less, the better."""
Layer = tuple[int, ...]
"""Who receives from each node, by their places among the nodes."""

_FORBIDDEN = 1 << 20
_SAME_DOMAIN = 1 << 8
_EXACT_MAX = 128
"""With more nodes, comparing each with each takes seconds: pairs are found along a ring."""
_SOFT_TRIES = 16
"""With how many others a pair that is good enough is compared on the ring."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Node:
    """A node and where it stands."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: str
    domain: str
    """What fails as one: a rack, a zone, or the node itself."""
    switch: str = ""
    """Nodes of one switch or rack are near; those without are near to nobody."""
    address: str = ""


Price = Callable[[Node, Node, Sequence[Node]], int]
"""What is against a pair, of which the giver has given to others already."""


def choose_peers(
    nodes: Sequence[Node], own: str, replicas: int, *, holds_instead: bool = False
) -> list[Node]:
    """Choose the peers that a node's shards are copied to, the first one chosen first.

    The first is far, the second near, and the others are far again, in different failure
    domains where there are so many. A node for which no far one is left gets far instead of
    near. With `holds_instead` the peers hold the shards instead of the node itself: the first
    is the next of its exchange group, and further ones are in other failure domains again.
    Raises ValueError for names that are not unique, or without this node's own.
    """
    ordered = _in_order(nodes)
    giver = _find_own([node.name for node in ordered], own, replicas)
    find_layers = _exchange_layers if holds_instead else _match_layers
    layers = find_layers(ordered, min(replicas, len(ordered) - 1))
    return [ordered[layer[giver]] for layer in layers]


def exchange_groups(nodes: Sequence[Node]) -> list[tuple[str, ...]]:
    """Pair the nodes, so that each keeps the other's shards instead of its own.

    Pairs, as two nodes that are lost together are then seldom a pair; in different failure
    domains as far as there are. One that is left over makes a group of three. The shards of
    each node are with the next of its group, those of the last one with the first.
    """
    ordered = _in_order(nodes)
    if len(ordered) < 2:
        return [(node.name,) for node in ordered]
    pairs, left = _pair(ordered)
    groups = [list(pair) for pair in pairs]
    if left is not None:
        _join_third(ordered, groups, left)
    return sorted(tuple(ordered[each].name for each in group) for group in groups)


def _in_order(nodes: Sequence[Node]) -> tuple[Node, ...]:
    counts = Counter(node.name for node in nodes)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"{', '.join(twice)} more than once among the nodes; want each once")
    return tuple(sorted(nodes))


def _find_own(names: Sequence[str], own: str, replicas: int) -> int:
    if own not in names:
        raise ValueError(f"node {own} is not among {len(names)} nodes; want it among them")
    if replicas < 0:
        raise ValueError(f"{replicas} replicas is not allowed; want 0 or more")
    return names.index(own)


@functools.lru_cache(maxsize=4)
def _match_layers(nodes: tuple[Node, ...], num_layers: int) -> tuple[Layer, ...]:
    """Return for each peer asked for who receives from each node; the far one first."""
    layers: tuple[Layer, ...] = ()
    for number in range(num_layers):
        layers = _add_layer(nodes, layers, _near_price if number == 1 else _far_price)
    return layers


@functools.lru_cache(maxsize=4)
def _exchange_layers(nodes: tuple[Node, ...], num_layers: int) -> tuple[Layer, ...]:
    """Return for each keeper asked for who receives from each node; the group's next first."""
    if num_layers == 0:
        return ()
    keepers = {
        giver: keeper
        for group in exchange_groups(nodes)
        for giver, keeper in zip(group, [*group[1:], group[0]], strict=True)
    }
    names = [node.name for node in nodes]
    first = tuple(names.index(keepers[each]) for each in names)
    layers: tuple[Layer, ...] = (first,)
    for _ in range(1, num_layers):
        layers = _add_layer(nodes, layers, _spread_price)
    return layers


def _add_layer(nodes: Sequence[Node], layers: tuple[Layer, ...], price: Price) -> tuple[Layer, ...]:
    """Add who receives from each node by a price, and nothing from the same node as before."""
    used = [{giver, *(layer[giver] for layer in layers)} for giver in range(len(nodes))]
    having = [[nodes[each] for each in used[giver] - {giver}] for giver in range(len(nodes))]

    def cost(giver: int, receiver: int) -> int:
        if receiver in used[giver]:
            return _FORBIDDEN
        return price(nodes[giver], nodes[receiver], having[giver])

    return (*layers, tuple(_match(nodes, cost, is_near_wanted=price is _near_price)))


def _spread_price(one: Node, other: Node, having: Sequence[Node]) -> int:
    """Prefer a failure domain that has no copy yet, then another than the own, then a switch."""
    has_copy = any(each.domain == other.domain for each in having)
    return 4 * has_copy + 2 * (one.domain == other.domain) + _is_near(one, other)


def _far_price(one: Node, other: Node, having: Sequence[Node]) -> int:
    """Prefer another failure domain, then one that has no copy yet, then another switch."""
    if one.domain == other.domain:
        return _SAME_DOMAIN
    has_copy = any(each.domain == other.domain for each in having)
    return 2 * has_copy + _is_near(one, other)


def _near_price(one: Node, other: Node, having: Sequence[Node]) -> int:
    """Prefer the same switch; for a node without a far peer another failure domain."""
    if all(each.domain == one.domain for each in having):
        return _SAME_DOMAIN if other.domain == one.domain else 0
    return 0 if _is_near(one, other) else 1 + (one.domain != other.domain)


def _is_near(one: Node, other: Node) -> bool:
    return bool(one.switch) and one.switch == other.switch


def _match(nodes: Sequence[Node], cost: Cost, *, is_near_wanted: bool) -> list[int]:
    """Give each node one receiver, each another one: as many of the cheapest pairs as fit first."""
    if len(nodes) > _EXACT_MAX:
        found = _match_on_ring(nodes, cost, is_near_wanted=is_near_wanted)
        if all(cost(giver, receiver) < _FORBIDDEN for giver, receiver in enumerate(found)):
            return found
    size = len(nodes)
    ranked = sorted(
        (price, mix(nodes[giver].name, nodes[receiver].name), giver, receiver)
        for giver in range(size)
        for receiver in range(size)
        if (price := cost(giver, receiver)) < _FORBIDDEN
    )
    receivers: dict[int, int] = {}
    taken: dict[int, int] = {}
    choices: dict[int, list[int]] = defaultdict(list)
    for _, pairs in itertools.groupby(ranked, key=lambda pair: pair[0]):
        for _, _, giver, receiver in pairs:
            choices[giver].append(receiver)
            if giver not in receivers and receiver not in taken:
                receivers[giver], taken[receiver] = receiver, giver
        for giver in range(size):
            if giver not in receivers:
                _augment(giver, choices, receivers, taken)
    # All are matched: every node may give to, and receive from, equally many.
    return [receivers[giver] for giver in range(size)]


def _match_on_ring(nodes: Sequence[Node], cost: Cost, *, is_near_wanted: bool) -> list[int]:
    """Let each give to the next in an order mixed from names; exchange what does not suit.

    Where near is wanted each switch is a ring of its own. Of pairs in one failure domain
    none is left that an exchange can part, so that as many as can be are far.
    """
    order = sorted(range(len(nodes)), key=lambda each: mix(nodes[each].name))
    rings: dict[str, list[int]] = defaultdict(list)
    for each in order:
        rings[nodes[each].switch if is_near_wanted else ""].append(each)
    alone = [ring.pop() for ring in rings.values() if len(ring) == 1]
    receivers = [0] * len(nodes)
    for ring in (*rings.values(), alone):
        for at, giver in enumerate(ring):
            receivers[giver] = ring[(at + 1) % len(ring)]
    stuck: set[str] = set()
    # Twice, as who gives up a pair that cannot be may leave another with a bad one.
    for at, giver in enumerate([*order, *order]):
        price = cost(giver, receivers[giver])
        is_bad = price >= _SAME_DOMAIN
        is_stuck = price < _FORBIDDEN and nodes[giver].domain in stuck
        if price == 0 or (is_stuck if is_bad else at >= len(order)):
            continue
        tries = len(order) if is_bad else _SOFT_TRIES
        others = (order[(at + step) % len(order)] for step in range(1, tries))
        if not _exchange(receivers, cost, giver, others) and is_bad:
            stuck.add(nodes[giver].domain)
    return receivers


def _exchange(receivers: list[int], cost: Cost, giver: int, others: Iterable[int]) -> bool:
    """Exchange a giver's receiver for another's as long as both are better off together.

    Says whether the giver's is in another failure domain, or as good as none is.
    """
    price = cost(giver, receivers[giver])
    for other in others:
        if price == 0:
            break
        ours, theirs = receivers[giver], receivers[other]
        mine, its = cost(giver, theirs), cost(other, ours)
        if mine + its < min(price + cost(other, theirs), _FORBIDDEN):
            receivers[giver], receivers[other] = theirs, ours
            price = mine
    return price < _SAME_DOMAIN


def _augment(
    giver: int,
    choices: Mapping[int, Sequence[int]],
    receivers: dict[int, int],
    taken: dict[int, int],
) -> None:
    """Find a receiver for one more giver, if there is one, moving as few others as it takes."""
    came_from: dict[int, int] = {}
    queue = [giver]
    for each in queue:
        for receiver in choices.get(each, ()):
            if receiver in came_from:
                continue
            came_from[receiver] = each
            if receiver in taken:
                queue.append(taken[receiver])
                continue
            end: int | None = receiver
            while end is not None:
                by = came_from[end]
                previous = receivers.get(by)
                receivers[by], taken[end] = end, by
                end = previous
            return


def _pair(nodes: Sequence[Node]) -> tuple[list[tuple[int, int]], int | None]:
    """Return pairs, of different failure domains first, and who is left over."""
    if len(nodes) > _EXACT_MAX:
        return _pair_on_ring(nodes)
    ranked = sorted(
        (
            nodes[one].domain == nodes[other].domain,
            _is_near(nodes[one], nodes[other]),
            mix(nodes[one].name, nodes[other].name),
            one,
            other,
        )
        for one in range(len(nodes))
        for other in range(one + 1, len(nodes))
    )
    free = set(range(len(nodes)))
    pairs = []
    for _, _, _, one, other in ranked:
        if one in free and other in free:
            pairs.append((one, other))
            free -= {one, other}
    _part(nodes, pairs)
    return pairs, min(free, default=None)


def _pair_on_ring(nodes: Sequence[Node]) -> tuple[list[tuple[int, int]], int | None]:
    """Pair each with the next of another failure domain, in an order mixed from names."""
    order = sorted(range(len(nodes)), key=lambda each: mix(nodes[each].name))
    pairs: list[tuple[int, int]] = []
    waiting: list[int] = []
    for each in order:
        # All who wait are of one failure domain.
        if waiting and nodes[waiting[0]].domain != nodes[each].domain:
            pairs.append((waiting.pop(0), each))
        else:
            waiting.append(each)
    while len(waiting) > 1:
        pairs.append((waiting.pop(), waiting.pop()))
    _part(nodes, pairs)
    return pairs, waiting[0] if waiting else None


def _part(nodes: Sequence[Node], pairs: list[tuple[int, int]]) -> None:
    """Part pairs of one failure domain by exchanging with a pair that has none of it."""
    for at, (one, other) in enumerate(pairs):
        domain = nodes[one].domain
        if nodes[other].domain != domain:
            continue
        for with_at, (left, right) in enumerate(pairs):
            if domain not in (nodes[left].domain, nodes[right].domain):
                pairs[at], pairs[with_at] = (one, left), (other, right)
                break


def _join_third(nodes: Sequence[Node], groups: list[list[int]], left: int) -> None:
    """Add the one that is left over to the pair that shares least with it."""

    def price(group: Sequence[int]) -> tuple[int, bytes]:
        num_shared = 3 - len({nodes[each].domain for each in (*group, left)})
        return num_shared, mix(nodes[left].name, *(nodes[each].name for each in group))

    min(groups, key=price).append(left)


def mix(*names: str) -> bytes:
    """Return an order that is the same on all nodes, and another one for other names."""
    joined = "\n".join(names).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(joined, digest_size=8).digest()
