"""What is seen of agents' connections from outside, and what agents say that have not all TLS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from resilience.agent.connections.transport import NO_AGENT, Gone
from resilience.runtime.door import AGENTS, SPEAKS_PLAIN, SPEAKS_TLS
from tests.ports import free_ports
from tests.resilience.tiered.cluster import Wire
from tests.resilience.tiered.fault_proxy import Recorder
from tests.resilience.transports import TOKEN, TcpWorld, say

_DOOR_BYTES = 88
TEXT = "what one agent says to another"


@pytest.fixture
def world() -> Iterator[TcpWorld]:
    each = TcpWorld()
    yield each
    each.close()


@pytest.mark.parametrize("tls", [True, False])
def test_a_sniffer_sees_no_message_under_tls(world: TcpWorld, *, tls: bool) -> None:
    world.tls = tls
    a, b = world.node("a"), world.node("b")
    recorder = Recorder(int(b.transport.address.rpartition(":")[2]))
    peer = a.transport.connect(recorder.endpoint.removeprefix("http://"))
    a.transport.send(peer, say(1, TEXT))
    world.settle(lambda: b.heard() == [1])
    b.transport.send(b.arrived[0].peer, say(2, TEXT))
    world.settle(lambda: a.heard() == [2])
    recorder.close()

    assert (TEXT.encode() in recorder.seen, AGENTS.magic in recorder.seen) == (not tls, not tls)
    assert TOKEN.encode() not in recorder.seen
    assert AGENTS.derive_key(TOKEN) not in recorder.seen


@pytest.mark.parametrize(("tls", "problem"), [(True, SPEAKS_PLAIN), (False, SPEAKS_TLS)])
def test_the_one_that_connects_says_that_one_side_alone_has_tls(
    world: TcpWorld, problem: str, *, tls: bool
) -> None:
    world.tls = tls
    a = world.node("a")
    world.tls = not tls
    b = world.node("b")

    peer = a.transport.connect(b.transport.address)
    world.settle(lambda: bool(a.arrived))

    assert a.arrived == [Gone(peer=peer, reason=problem)]
    assert b.arrived == []


@pytest.mark.parametrize("is_met", [False, True], ids=["handshake", "message"])
def test_a_bit_that_flips_on_its_way_is_no_other_end_without_tls(
    world: TcpWorld, *, is_met: bool
) -> None:
    """Else the agents would be told to set an option that is set."""
    world.tls = True
    a, b = world.node("a"), world.node("b")
    wire = Wire(free_ports(1)[0], int(b.transport.address.rpartition(":")[2]))
    wire.flip_at = [] if is_met else [_DOOR_BYTES + 40]
    peer = a.transport.connect(wire.endpoint.removeprefix("http://"))
    if is_met:
        world.settle(lambda: bool(a.arrived and b.arrived))
        a.arrived.clear()
        wire.flip_at = [wire.bytes_up + 1000]
        a.transport.send(peer, say(1, TEXT * 100))
    world.settle(lambda: bool(a.arrived))
    wire.close()

    (gone,) = a.arrived
    assert isinstance(gone, Gone)
    assert gone.reason.startswith("TLS has failed: " if is_met else f"{NO_AGENT}: TLS has failed: ")
    assert gone.reason.endswith("bad record mac")
