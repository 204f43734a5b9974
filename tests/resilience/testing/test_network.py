"""The troubles of a simulated network; what TCP does as well is in test_transport_contract.py."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.resilience.transports import MemoryWorld, Node, pair, say

LEASE_S = 3.0


def talking() -> tuple[MemoryWorld, Node, int, Node, int]:
    """Return a world, and two nodes that talk there."""
    world = MemoryWorld(1, LEASE_S)
    return world, *pair(world)


def test_a_silent_cut_ends_connections_after_the_lease_and_not_before() -> None:
    world, a, b_of_a, b, _ = talking()
    cut_s = world.network.now_s

    world.network.cut({"a"}, {"b"}, is_silent=True)
    a.transport.send(b_of_a, say(1))
    world.run_until(cut_s + LEASE_S - 0.001)
    assert a.arrived == b.arrived == []
    world.run_until(cut_s + LEASE_S + 1)

    assert a.kinds() == b.kinds() == ["Gone"]


def test_what_was_said_during_a_short_cut_arrives_after_it() -> None:
    world, a, b_of_a, b, _ = talking()

    a.transport.send(b_of_a, say(1))
    world.network.cut({"a"}, {"b"}, is_silent=True)
    a.transport.send(b_of_a, say(2))
    world.run_until(world.network.now_s + LEASE_S / 2)
    assert b.arrived == []
    world.network.heal({"a"}, {"b"})
    a.transport.send(b_of_a, say(3))
    world.run_until(world.network.now_s + 10 * LEASE_S)

    assert b.heard() == [1, 2, 3]
    assert a.arrived == []


def test_a_connection_that_one_side_gave_up_is_gone_for_the_other_after_healing() -> None:
    world, a, b_of_a, b, _ = talking()

    world.network.cut({"a"}, {"b"}, is_silent=True)
    a.transport.hang_up(b_of_a)
    world.run_until(world.network.now_s + 1)
    assert b.arrived == []
    world.network.heal({"b"}, {"a"})
    world.run_until(world.network.now_s + 1)

    assert b.kinds() == ["Gone"]


def test_a_cut_that_resets_ends_connections_at_once_and_refuses_new_ones() -> None:
    world, a, b_of_a, b, _ = talking()
    world.node("c")

    a.transport.send(b_of_a, say(1))
    world.network.cut({"a", "c"}, {"b"}, is_silent=False)
    again = a.transport.connect(b.transport.address)
    beside = a.transport.connect("c:1")
    world.run_until(world.network.now_s + 0.1)

    assert a.kinds(b_of_a) == a.kinds(again) == b.kinds() == ["Gone"]
    assert a.kinds(beside) == ["Reached"]


def test_a_connection_begun_during_a_silent_cut_is_made_once_it_is_healed() -> None:
    world, a, _, b, _ = talking()
    world.network.cut({"a"}, {"b"}, is_silent=True)
    world.run_until(world.network.now_s + 2 * LEASE_S)
    early = a.transport.connect(b.transport.address)
    world.run_until(a.transport.tick(world.network.now_s))
    a.transport.tick(world.network.now_s)
    late = a.transport.connect(b.transport.address)
    world.network.heal({"a"}, {"b"})
    b.arrived.clear()
    world.run_until(world.network.now_s + 1)

    a.arrived += a.transport.receive()
    assert a.kinds(early) == ["Gone"]
    assert a.kinds(late) == ["Reached"]
    assert b.kinds() == ["Came"]


def test_a_node_that_stands_still_receives_later_and_loses_nothing() -> None:
    world, a, b_of_a, b, a_of_b = talking()

    world.network.pause("b")
    for number in range(3):
        a.transport.send(b_of_a, say(number))
    world.run_until(world.network.now_s + 10 * LEASE_S)
    assert a.arrived == b.arrived == []
    world.network.resume("b")
    world.run_until(world.network.now_s)
    b.transport.send(a_of_b, say(9))
    world.run_until(world.network.now_s + 1)

    assert b.heard() == [0, 1, 2]
    assert a.heard() == [9]


def test_a_node_that_stands_still_does_not_answer_and_puts_its_own_deadlines_off() -> None:
    world, a, _, b, _ = talking()
    to_paused = a.transport.connect(b.transport.address)
    of_paused = b.transport.connect(a.transport.address)
    world.network.pause("b")

    due_s = a.transport.tick(world.network.now_s)
    assert due_s == world.network.now_s + LEASE_S
    world.run_until(due_s)
    a.transport.tick(due_s)
    world.run_until(due_s + LEASE_S)
    world.network.resume("b")
    assert b.transport.tick(world.network.now_s) > world.network.now_s
    world.run_until(world.network.now_s + 1)

    a.arrived += a.transport.receive()
    b.arrived += b.transport.receive()
    assert a.kinds(to_paused) == ["Gone"]
    assert b.kinds(of_paused) == ["Reached"]


def test_a_process_that_ends_can_start_again_at_its_address() -> None:
    world, a, b_of_a, b, a_of_b = talking()

    b.transport.send(a_of_b, say(1))
    world.network.kill("b")
    refused = a.transport.connect("b:1")
    world.run_until(world.network.now_s + 1)
    assert a.kinds(b_of_a) == ["Heard", "Gone"]
    assert a.kinds(refused) == ["Gone"]
    again = world.node("b")
    peer = a.transport.connect(again.transport.address)
    world.run_until(world.network.now_s + 1)

    assert a.kinds(peer) == ["Reached"]
    assert again.kinds() == ["Came"]


def test_a_lost_host_says_nothing_when_its_process_ends() -> None:
    world, a, _, _, _ = talking()
    cut_s = world.network.now_s

    world.network.cut({"b"}, {"a"}, is_silent=True)
    world.network.kill("b")
    world.run_until(cut_s + LEASE_S - 0.001)
    assert a.arrived == []
    world.run_until(cut_s + LEASE_S + 1)

    assert a.kinds() == ["Gone"]


def test_connections_can_be_reset_between_nodes_that_reach_each_other() -> None:
    world, a, b_of_a, b, a_of_b = talking()

    world.network.reset({"a"}, {"b"})
    a.transport.send(b_of_a, say(1))
    world.run_until(world.network.now_s + 1)

    assert a.kinds() == b.kinds(a_of_b) == ["Gone"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_seed_is_the_same_network(seed: int) -> None:
    """Also where connections break; what arrives of each peer is the beginning of what was said."""
    traces = []
    for _ in range(2):
        world = MemoryWorld(seed, LEASE_S)
        world.network = type(world.network)(seed, loss=0.1, lease_s=LEASE_S)
        a, b = world.node("a"), world.node("b")
        peers = [a.transport.connect(b.transport.address) for _ in range(3)]
        for number in range(30):
            for peer in peers:
                a.transport.send(peer, say(number))
        world.run_until(10)
        traces.append((a.arrived, b.arrived))
        for peer in {each.peer for each in b.arrived}:
            heard = b.heard(peer)
            assert heard == [*range(len(heard))]
            assert (b.kinds(peer)[-1] == "Gone") == (len(heard) < 30)

    assert traces[0] == traces[1]
    assert f"seed={seed}" in repr(world.network)


def test_nothing_is_due_on_a_network_at_rest() -> None:
    world, *_ = talking()

    assert world.network.next_s() == math.inf
    assert world.network.ready() == []
    with pytest.raises(AssertionError):
        world.network.advance(world.network.now_s - 1)
