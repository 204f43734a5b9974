"""Who keeps copies of whose shards: near and far, as many as each gives, few moves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.placement import Node, choose_peers, exchange_groups

Choices = Mapping[Node, list[Node]]
NUM_EXACT = st.sampled_from([128, 1])
"""With more nodes pairs are found along a ring."""


def racks(*sizes: int) -> list[Node]:
    """Nodes in racks, each with its switch, each a failure domain."""
    return [
        Node(name=f"n{rack}-{place}", domain=f"rack{rack}", switch=f"switch{rack}")
        for rack, size in enumerate(sizes)
        for place in range(size)
    ]


def choose_all(nodes: Sequence[Node], replicas: int) -> Choices:
    return {node: choose_peers(nodes, node.name, replicas) for node in nodes}


def kinds(own: Node, peers: Sequence[Node]) -> list[str]:
    """near: same switch. far: another failure domain. other: neither."""
    return [
        "near" if own.switch == peer.switch != "" else "far" if is_far(own, peer) else "other"
        for peer in peers
    ]


def is_far(own: Node, peer: Node) -> bool:
    return own.domain != peer.domain


def has_far(own: Node, peers: Sequence[Node]) -> bool:
    return any(is_far(own, peer) for peer in peers)


def names(peers: Sequence[Node]) -> set[str]:
    return {peer.name for peer in peers}


@st.composite
def uneven_racks(draw: st.DrawFn) -> list[Node]:
    """Up to 32 nodes in racks of any sizes, some without a switch or in a rack of two domains."""
    sizes = draw(st.lists(st.integers(1, 16), min_size=1, max_size=12))
    nodes = racks(*sizes)[:32]
    if draw(st.booleans()):
        return nodes
    return [
        Node(
            name=node.name,
            domain=draw(st.sampled_from([node.domain, node.name, "other"])),
            switch=draw(st.sampled_from([node.switch, node.switch, ""])),
        )
        for node in nodes
    ]


def test_three_peers_are_in_three_failure_domains() -> None:
    for own, peers in choose_all(racks(4, 4, 4, 4), 3).items():
        assert kinds(own, peers) == ["far", "near", "far"]
        assert len({peer.domain for peer in peers}) == 3


def test_near_and_far_where_each_node_is_a_failure_domain() -> None:
    """Far leaves the switch where it can, as switches fail too."""
    nodes = [Node(name=each.name, domain=each.name, switch=each.switch) for each in racks(3, 3, 3)]

    for own, peers in choose_all(nodes, 2).items():
        assert kinds(own, peers) == ["far", "near"]


def test_who_has_no_far_peer_gets_far_instead_of_near() -> None:
    assert all(has_far(own, peers) for own, peers in choose_all(racks(4, 2), 2).items())


@given(uneven_racks(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_node_receives_as_many_as_it_gives(
    nodes: list[Node], replicas: int, rng: random.Random
) -> None:
    choices = choose_all(nodes, replicas)

    wanted = min(replicas, len(nodes) - 1)
    received = Counter(name for choice in choices.values() for name in names(choice))
    for own, peers in choices.items():
        assert len(names(peers)) == len(peers) == wanted == received[own.name]
        assert own.name not in names(peers)
    shuffled = rng.sample(nodes, len(nodes))
    assert choose_peers(shuffled, nodes[0].name, replicas) == choices[nodes[0]]


@given(uneven_racks())
def test_as_many_nodes_have_a_far_peer_as_can_have_one(nodes: list[Node]) -> None:
    biggest = max(Counter(node.domain for node in nodes).values())

    far = [own for own, peers in choose_all(nodes, 1).items() if has_far(own, peers)]

    assert len(far) == min(len(nodes), 2 * (len(nodes) - biggest))


@given(st.lists(st.integers(2, 8), min_size=2, max_size=8))
def test_every_node_of_a_rack_of_two_or_more_has_a_near_peer(sizes: list[int]) -> None:
    biggest = max(sizes)
    choices = choose_all(racks(*sizes), 2)

    if 2 * biggest <= sum(sizes):
        assert all(kinds(own, peers) == ["far", "near"] for own, peers in choices.items())


@pytest.mark.parametrize("sizes", [(4, 4), (16, 16), (5, 3, 8, 1), (1,) * 20, (12,)])
def test_a_node_that_leaves_moves_few(sizes: tuple[int, ...]) -> None:
    """Two have to move, those that gave to it; others as their failure domains want it."""
    nodes = racks(*sizes)
    before = choose_all(nodes, 2)
    moves = []
    for gone in nodes:
        after = choose_all([node for node in nodes if node != gone], 2)
        moves.append(sum(len(names(after[name]) - names(before[name])) for name in after))

    assert min(moves) >= 1
    assert sum(moves) / len(moves) <= 10
    assert max(moves) <= max(12, len(nodes) // 4)


def test_names_decide_and_not_their_order_alone() -> None:
    """Racks of neighbours do not give to each other one to one: losses spread."""
    given_to = {
        peers[0].domain
        for own, peers in choose_all(racks(8, 8, 8, 8), 1).items()
        if own.domain == "rack0"
    }

    assert len(given_to) >= 2


def test_unknown_and_double_names_are_refused() -> None:
    assert exchange_groups([]) == choose_peers(racks(2), "n0-0", 0) == []
    with pytest.raises(ValueError, match="node x is not among 2 nodes; want it among them"):
        choose_peers(racks(2), "x", 1)
    with pytest.raises(ValueError, match="n0-0 more than once among the nodes; want each once"):
        choose_peers(racks(1) * 2, "n0-0", 1)
    with pytest.raises(ValueError, match="-1 replicas is not allowed; want 0 or more"):
        choose_peers(racks(2), "n0-0", -1)


def exchange(nodes: list[Node], num_exact: int) -> list[tuple[str, ...]]:
    """Group nodes, as many nodes as are compared each with each being so few."""
    with patch("resilience.tiered.placement._EXACT_MAX", num_exact):
        return exchange_groups(nodes)


@given(uneven_racks(), NUM_EXACT)
def test_groups_exchange_in_pairs_and_at_most_one_three(nodes: list[Node], num_exact: int) -> None:
    groups = exchange(nodes, num_exact)

    members = [name for group in groups for name in group]
    assert sorted(members) == sorted(node.name for node in nodes)
    sizes = Counter(map(len, groups))
    if len(nodes) > 1:
        assert sizes[3] == len(nodes) % 2
        assert sizes[2] == (len(nodes) - 3 * sizes[3]) // 2


@given(uneven_racks(), NUM_EXACT)
def test_who_exchanges_is_in_another_failure_domain_where_that_can_be(
    nodes: list[Node], num_exact: int
) -> None:
    domains = {node.name: node.domain for node in nodes}
    biggest = max(Counter(domains.values()).values())
    groups = exchange(nodes, num_exact)

    shared = [
        group for group in groups if len(group) == 2 and len({domains[n] for n in group}) == 1
    ]

    others = len(nodes) - biggest
    assert len(shared) <= max(0, (biggest - others) // 2)


def test_a_pair_that_leaves_parts_few_others() -> None:
    nodes = racks(8, 8, 8, 8)
    before = set(exchange_groups(nodes))

    gone = before.pop()
    after = set(exchange_groups([node for node in nodes if node.name not in gone]))

    assert len(before - after) <= 4


@pytest.mark.parametrize("sizes", [(16,) * 10, (1,) * 150, (50, 50, 40), (100, 40, 20), (140,)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_hundreds_of_nodes_give_and_receive_as_few_do(
    sizes: tuple[int, ...], replicas: int
) -> None:
    nodes = racks(*sizes)
    choices = choose_all(nodes, replicas)

    received = Counter(name for choice in choices.values() for name in names(choice))
    assert set(received.values()) == {replicas}
    assert all(len(names(peers) - {own.name}) == replicas for own, peers in choices.items())
    others = len(nodes) - max(sizes)
    num_far = sum(has_far(own, peers) for own, peers in choices.items())
    assert num_far >= min(len(nodes), 2 * others)
    if 1 < max(sizes) <= others and replicas > 1:
        expected = ["far", "near", *["far"] * (replicas - 2)]
        assert all(kinds(own, peers) == expected for own, peers in choices.items())


def test_a_node_that_leaves_hundreds_moves_few() -> None:
    nodes = racks(*(16,) * 9)
    before = choose_all(nodes, 2)

    for gone in nodes[::24]:
        after = choose_all([node for node in nodes if node != gone], 2)
        assert sum(len(names(after[name]) - names(before[name])) for name in after) <= 12
