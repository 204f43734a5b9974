"""What agents' connections do, over TCP and in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from resilience.agent.connections.transport import Gone, Heard, Reached
from tests.resilience.transports import MemoryWorld, TcpWorld, World, pair, say

KINDS = {"tcp": TcpWorld, "tls": partial(TcpWorld, tls=True), "memory": MemoryWorld}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    each = request.param()
    yield each
    each.close()


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def hasty_world(request: pytest.FixtureRequest) -> Iterator[World]:
    each = request.param(lease_s=0.2)
    yield each
    each.close()


def test_messages_arrive_in_order_in_both_directions(world: World) -> None:
    a, b_of_a, b, a_of_b = pair(world)

    for number in range(100):
        a.transport.send(b_of_a, say(number))
        b.transport.send(a_of_b, say(number + 100))
    world.settle(lambda: len(a.arrived) == len(b.arrived) == 100)

    assert b.heard(a_of_b) == [*range(100)]
    assert a.heard(b_of_a) == [*range(100, 200)]


def test_what_is_said_before_the_door_arrives_behind_it(world: World) -> None:
    a, b = world.node("a"), world.node("b")

    peer = a.transport.connect(b.transport.address)
    a.transport.send(peer, say(1))
    a.transport.send(peer, say(2))
    world.settle(lambda: len(b.arrived) == 3)

    assert b.kinds() == ["Came", "Heard", "Heard"]
    assert b.heard() == [1, 2]


def test_what_was_said_before_hanging_up_arrives(world: World) -> None:
    a, b_of_a, b, a_of_b = pair(world)

    b.transport.send(a_of_b, say(7))
    a.transport.send(b_of_a, say(1, "long" * 50_000))
    a.transport.hang_up(b_of_a)
    world.settle(lambda: "Gone" in b.kinds())

    assert b.kinds() == ["Heard", "Gone"]
    assert a.arrived == a.transport.receive() == []


def test_what_has_come_and_was_not_received_is_gone_with_hanging_up(world: World) -> None:
    a, b_of_a, b, a_of_b = pair(world)

    b.transport.send(a_of_b, say(1))
    world.let_arrive()
    a.transport.tick(time.monotonic())
    a.transport.hang_up(b_of_a)

    assert a.transport.receive() == []


def test_what_a_peer_said_before_its_end_is_heard_by_one_that_spoke_to_it_since(
    world: World,
) -> None:
    a, b_of_a, b, a_of_b = pair(world)

    b.transport.send(a_of_b, say(1))
    b.transport.hang_up(a_of_b)
    world.let_arrive()
    for number in range(3):
        a.transport.send(b_of_a, say(number))
    world.settle(lambda: len(a.arrived) == 2)

    assert a.heard() == [1]
    assert a.kinds() == ["Heard", "Gone"]


def test_nothing_comes_of_a_peer_after_hanging_up(world: World) -> None:
    a, b_of_a, b, a_of_b = pair(world)
    c = world.node("c")
    c_of_a = a.transport.connect(c.transport.address)

    b.transport.send(a_of_b, say(1))
    world.settle(lambda: bool(c.arrived and a.arrived))
    a.transport.hang_up(b_of_a)
    a.transport.hang_up(b_of_a)
    a.transport.send(b_of_a, say(2))
    a.arrived.clear()
    a.transport.send(c_of_a, say(3))
    world.settle(lambda: bool(c.heard()) and "Gone" in b.kinds())

    assert {each.peer for each in a.arrived} <= {c_of_a}
    assert b.heard() == []


def test_end_of_a_node_comes_once_to_each_peer_and_nothing_after_it(world: World) -> None:
    a, b_of_a, b, _ = pair(world)
    c = world.node("c")
    c.transport.connect(b.transport.address)
    world.settle(lambda: "Reached" in c.kinds())

    address = b.transport.address
    world.end(b)
    world.settle(lambda: "Gone" in a.kinds() and "Gone" in c.kinds())
    a.transport.send(b_of_a, say(1))
    again = c.transport.connect(address)
    world.settle(lambda: bool(c.kinds(again)))

    assert a.kinds() == ["Gone"]
    assert c.kinds() == ["Reached", "Gone", "Gone"]


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", "[::1:7", ":1"])
def test_what_is_no_address_is_gone_at_once(world: World, address: str) -> None:
    a = world.node("a")

    peer = a.transport.connect(address)
    world.settle(lambda: bool(a.arrived))

    assert [type(each) for each in a.arrived] == [Gone]
    assert a.kinds(peer) == ["Gone"]


def test_an_agent_does_not_come_in_at_its_own_door(world: World) -> None:
    a = world.node("a")

    a.transport.connect(a.transport.address)
    world.settle(lambda: bool(a.arrived))

    assert a.kinds() == ["Gone"]


@pytest.mark.parametrize("token", ["of another run", ""])
def test_an_agent_without_the_token_stays_outside(world: World, token: str) -> None:
    a, b_of_a, b, a_of_b = pair(world)
    c = world.node("c", token)

    peer = c.transport.connect(b.transport.address)
    c.transport.send(peer, say(1))
    back = b.transport.connect(c.transport.address)
    world.settle(lambda: bool(c.arrived and b.arrived))
    a.transport.send(b_of_a, say(2))
    world.settle(lambda: bool(b.heard()))

    (gone,) = c.arrived
    assert isinstance(gone, Gone)
    assert "does not know the run's token" in gone.reason
    assert b.kinds(back) == ["Gone"]
    assert b.kinds(a_of_b) == ["Heard"]
    assert len(b.arrived) == 2


def test_an_address_that_does_not_answer_is_gone_in_time(hasty_world: World) -> None:
    a, b = hasty_world.node("a"), hasty_world.node("b")

    silent = a.transport.connect(hasty_world.silent_address())
    b_of_a = a.transport.connect(b.transport.address)
    hasty_world.settle(lambda: bool(a.kinds(silent)))

    assert a.arrived[0] == Reached(peer=b_of_a)
    assert isinstance(a.arrived[1], Gone)
    assert "does not answer" in a.arrived[1].reason


def test_a_long_message_arrives_whole_and_holds_nobody_up(world: World) -> None:
    a, b_of_a, b, a_of_b = pair(world)
    c = world.node("c")
    c_of_a = a.transport.connect(c.transport.address)
    world.settle(lambda: bool(c.arrived and a.arrived))
    text = "long " * 2_000_000

    a.transport.send(b_of_a, say(1, text))
    a.transport.send(b_of_a, say(2))
    a.transport.send(c_of_a, say(3))
    world.settle(lambda: c.heard() == [3])
    world.settle(lambda: b.heard(a_of_b) == [1, 2])

    first = b.arrived[0]
    assert isinstance(first, Heard)
    assert first.message == say(1, text)


def test_connections_of_both_to_each_other_are_two_peers(world: World) -> None:
    a, b_of_a, b, a_of_b = pair(world)

    second = b.transport.connect(a.transport.address)
    world.settle(lambda: bool(a.arrived and b.arrived))
    (came,) = a.arrived
    a.transport.hang_up(b_of_a)
    a.transport.send(came.peer, say(5))
    world.settle(lambda: len(b.arrived) == 3)

    assert b.kinds(a_of_b) == ["Gone"]
    assert b.heard(second) == [5]
