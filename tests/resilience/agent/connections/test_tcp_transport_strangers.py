"""What strangers can do to agents' connections over TCP: nothing."""

from __future__ import annotations

import itertools
import resource
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilience.agent.connections.tcp_transport import (
    QUEUE_BYTES_MAX,
)
from resilience.agent.connections.transport import Gone, Heard
from resilience.comm.messages import StoreReply, encode
from resilience.runtime.door import (
    AGENTS,
    NAME_BYTES,
    NONCE_BYTES,
    ORIGIN_PLACES_MAX,
    PROOF_S,
    Door,
    DoorError,
    DoorKind,
)
from resilience.runtime.server import Credentials
from resilience.runtime.tls import NOT_YET, derive_tls
from tests.resilience.tiered.fault_proxy import Recorder
from tests.resilience.transports import LIMIT_S, TOKEN, Node, TcpWorld, say

ROOT = str(Path(__file__).parents[4])
MAGIC = AGENTS.magic
few = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Pair:
    """Two agents that talk, of which strangers want something."""

    def __init__(self, lease_s: float = 10.0, *, tls: bool = False) -> None:
        self.world = TcpWorld(lease_s, tls=tls)
        self.a, self.b = self.world.node("a"), self.world.node("b")
        self.b_of_a = self.a.transport.connect(self.b.transport.address)
        self.world.settle(lambda: bool(self.a.arrived and self.b.arrived))
        self.a_of_b = self.b.arrived[0].peer
        self._number = 0

    def stranger(self, host: str = "127.0.0.1", node: Node | None = None) -> socket.socket:
        """Return a connection to the first agent's port."""
        address, _, port = (node or self.a).transport.address.rpartition(":")
        return socket.create_connection((address, int(port)), source_address=(host, 0))

    def admit(self, stranger: socket.socket) -> socket.socket:
        """Lead a stranger's connection through the first agent's door."""
        tls = derive_tls(TOKEN) if self.world.tls else None
        passage = Credentials(kind=AGENTS, token=TOKEN, tls=tls).lead(stranger, connects=True)
        while not passage.advance():
            self.world.turn(time.monotonic() + 0.01)
        passage.socket.setblocking(True)  # noqa: FBT003
        return passage.socket

    def friend(self, host: str = "127.0.0.1") -> socket.socket:
        """Return a connection that has passed the first agent's door."""
        return self.admit(self.stranger(host))

    def settle_until_closed(self, stranger: socket.socket) -> bytes:
        """Return what a stranger is told before its connection ends."""
        stranger.setblocking(False)  # noqa: FBT003
        told = bytearray()

        def is_closed() -> bool:
            try:
                data = stranger.recv(1 << 16)
            except NOT_YET:
                return False
            except OSError:
                return True
            told.extend(data)
            return not data

        end_s = time.monotonic() + LIMIT_S
        while not is_closed():
            assert time.monotonic() < end_s
            self.world.turn(time.monotonic() + 0.01)
        return bytes(told)

    def check_undisturbed(self, *others: str) -> None:
        """Fail where the two do not talk, or anything else has come than these of others."""
        self._number += 1
        self.a.transport.send(self.b_of_a, say(self._number))
        self.b.transport.send(self.a_of_b, say(self._number))
        self.world.settle(lambda: bool(self.a.heard(self.b_of_a) and self.b.heard(self.a_of_b)))
        heard = [self._number]
        assert self.a.heard(self.b_of_a) == self.b.heard(self.a_of_b) == heard
        assert [type(e).__name__ for e in self.a.arrived if e.peer != self.b_of_a] == [*others]
        self.a.arrived.clear()
        self.b.arrived.clear()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def two(request: pytest.FixtureRequest) -> Iterator[Pair]:
    each = Pair(tls=request.param)
    each.a.arrived.clear()
    each.b.arrived.clear()
    yield each
    each.world.close()


@few
@given(st.one_of(st.binary(max_size=2000), st.binary(max_size=200).map(lambda each: MAGIC + each)))
def test_garbage_at_the_door(two: Pair, data: bytes) -> None:
    with two.stranger() as stranger:
        stranger.sendall(data)
        with suppress(OSError):  # refused by its first bytes
            stranger.shutdown(socket.SHUT_WR)
        two.settle_until_closed(stranger)

        two.check_undisturbed()


@few
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_garbage_behind_the_door_ends_that_connection(two: Pair, lines: list[bytes]) -> None:
    with two.friend() as friend:
        friend.sendall(b"\n".join([b"", *lines, b"{}\n"]))
        two.settle_until_closed(friend)

        two.check_undisturbed("Came", "Gone")


def test_a_recorded_connection_opens_no_agent(two: Pair) -> None:
    """Neither the agent that was spoken to nor another one, nor one that connects."""
    recorder = Recorder(int(two.a.transport.address.rpartition(":")[2]))
    c = two.world.node("c")
    peer = c.transport.connect(recorder.endpoint.removeprefix("http://"))
    c.transport.send(peer, say(7))
    two.world.settle(lambda: two.a.heard() == [7])
    two.a.transport.send(two.a.arrived[0].peer, say(8))
    two.world.settle(lambda: c.heard() == [8])
    recorder.close()
    two.world.settle(lambda: two.a.kinds()[-1] == "Gone")

    for node, said in itertools.product((two.a, two.b), (recorder.up, recorder.seen)):
        with two.stranger(node=node) as stranger:
            stranger.sendall(said)
            two.settle_until_closed(stranger)
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = two.b.transport.connect(f"127.0.0.1:{other.getsockname()[1]}")
        two.world.settle(lambda: bool(select.select([other], [], [], 0)[0]))
        with other.accept()[0] as accepted:
            accepted.sendall(recorder.down)
            two.world.settle(lambda: two.b.kinds(number) == ["Gone"])

    two.check_undisturbed("Came", "Heard", "Gone")


def test_a_flooded_port_wakes_an_agent_from_time_to_time(two: Pair) -> None:
    with ExitStack() as stack:
        early = [stack.enter_context(two.stranger()) for _ in range(ORIGIN_PLACES_MAX + 1)]
        two.a.transport.receive()
        assert select.select(early[:1], [], [], 0)[0], "all were accepted at once"
        stack.enter_context(two.stranger())
        is_awake = [bool(select.select([two.a.transport], [], [], 0)[0])]
        two.a.transport.tick(two.a.transport.tick(0.0))
        is_awake.append(bool(select.select([two.a.transport], [], [], 0)[0]))

        assert is_awake == [False, True]
        two.check_undisturbed()


def test_agent_of_another_version_hears_which_version_is_there(two: Pair) -> None:
    """So it can say why it does not join: code in a shared folder may change within a run."""
    kind = AGENTS.over_tls() if two.world.tls else AGENTS
    with two.stranger() as other:
        other.sendall(b"agents 1".ljust(len(MAGIC) + NAME_BYTES + NONCE_BYTES))
        told = two.settle_until_closed(other)
    assert told.startswith(kind.magic)
    door = Door(DoorKind("an agent", b"agents 1"), TOKEN, name=bytes(NAME_BYTES),
                nonce=bytes(NONCE_BYTES), connects=True)  # fmt: skip
    with pytest.raises(DoorError, match="something else than an agent of this version"):
        door.feed(told)
    two.check_undisturbed()


def test_strangers_hear_the_door_before_any_tls(two: Pair) -> None:
    """To compute TLS's handshake for a flood of them would take a processor from the training."""
    with two.stranger() as stranger:
        stranger.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert two.settle_until_closed(stranger)[:6] == MAGIC[:6]
        two.check_undisturbed()


def test_a_message_right_behind_the_proof_is_heard(two: Pair) -> None:
    with two.friend() as friend:
        friend.sendall(encode(say(1)))
        two.world.settle(lambda: len(two.a.arrived) == 2)

        two.check_undisturbed("Came", "Heard")


def test_half_a_message_holds_nobody_up(two: Pair) -> None:
    with two.friend() as friend:
        friend.sendall(encode(say(1)) + encode(say(2))[:-5])
        two.world.settle(lambda: len(two.a.arrived) == 2)
        two.check_undisturbed("Came", "Heard")

        friend.close()
        two.world.settle(lambda: bool(two.a.arrived))
        two.check_undisturbed("Gone")


def test_peer_that_does_not_read_is_gone_and_holds_nobody_up() -> None:
    two = Pair(lease_s=2.0)
    two.a.arrived.clear()
    two.b.arrived.clear()
    with two.friend():
        two.world.settle(lambda: bool(two.a.arrived))
        (came,) = two.a.arrived
        for number in range(20):
            two.a.transport.send(came.peer, say(number, "long" * 250_000))
        two.check_undisturbed("Came")

        two.world.settle(lambda: bool(two.a.arrived))
        two.check_undisturbed("Gone")
    two.world.close()


@pytest.mark.parametrize("tls", [False, True])
def test_peer_that_reads_a_long_message_slowly_stays(*, tls: bool) -> None:
    two = Pair(lease_s=0.5, tls=tls)
    two.a.arrived.clear()
    with two.friend() as friend:
        two.world.settle(lambda: bool(two.a.arrived))
        (came,) = two.a.arrived
        two.a.transport.send(came.peer, say(1, "x" * (40 << 20)))
        end_s = time.monotonic() + 3 * two.world.lease_s
        while time.monotonic() < end_s:
            for _ in range(32):
                friend.recv(1 << 14)
            two.world.turn(time.monotonic() + 0.05)

        assert two.a.kinds() == ["Came"]
    two.world.close()


def test_peer_for_which_too_much_waits_is_gone(two: Pair) -> None:
    with two.friend():
        two.world.settle(lambda: bool(two.a.arrived))
        (came,) = two.a.arrived
        half = say(1, "x" * (QUEUE_BYTES_MAX // 2))
        for _ in range(3):
            two.a.transport.send(came.peer, half)

        assert select.select([two.a.transport], [], [], 0)[0]
        (gone,) = two.a.transport.receive()
        assert gone == Gone(peer=came.peer, reason=f"more than {QUEUE_BYTES_MAX} bytes wait for it")
        two.check_undisturbed("Came")


def test_many_may_be_told_one_large_value(two: Pair) -> None:
    value = "x" * (QUEUE_BYTES_MAX // 4)
    two.b.arrived.clear()
    for number in range(6):
        reply = StoreReply(generation=0, number=number, worker=0, values=(value,))
        two.a.transport.send(two.b_of_a, reply)
    two.world.settle(lambda: len(two.b.arrived) == 6)

    told = [each.message for each in two.b.arrived if isinstance(each, Heard)]
    assert [each.number for each in told if isinstance(each, StoreReply)] == [*range(6)]


def test_silence_at_the_door_has_a_deadline(two: Pair) -> None:
    with two.stranger() as stranger:
        stranger.sendall(MAGIC[:6])
        two.check_undisturbed()
        due_s = two.a.transport.tick(time.monotonic())
        assert due_s < time.monotonic() + PROOF_S

        assert two.a.transport.tick(due_s) == float("inf")
        two.settle_until_closed(stranger)
        two.check_undisturbed()


@pytest.mark.parametrize("data", [b"", b"x"])
def test_a_connection_that_is_reset_at_once_harms_nobody(two: Pair, data: bytes) -> None:
    stranger = two.stranger()
    stranger.sendall(data)
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()

    two.check_undisturbed()
    assert two.a.transport.tick(time.monotonic()) == float("inf")


def test_a_flood_from_one_host_takes_nobody_s_place(two: Pair) -> None:
    with ExitStack() as stack:
        flood = [
            stack.enter_context(two.stranger("127.0.0.2")) for _ in range(ORIGIN_PLACES_MAX + 9)
        ]
        friend = two.stranger()
        early = flood[: len(flood) - ORIGIN_PLACES_MAX]
        for each in early:
            two.settle_until_closed(each)
        stack.enter_context(two.admit(friend))
        stack.enter_context(two.friend("127.0.0.2"))
        two.world.settle(lambda: len(two.a.arrived) == 2)

        two.check_undisturbed("Came", "Came")
        assert not select.select(flood[len(early) + 1 :], [], [], 0)[0]


def test_without_descriptors_nobody_is_let_in_until_there_are_some(two: Pair) -> None:
    with two.stranger() as friend:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = max(two.a.transport.fileno(), friend.fileno())
        with ExitStack() as stack:
            while (taken := stack.enter_context(socket.socket())).fileno() < lowest:
                pass
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken.fileno() + 1, limits[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            two.a.transport.receive()
            due_s = two.a.transport.tick(time.monotonic())

            assert due_s < time.monotonic() + 2
            assert not select.select([two.a.transport], [], [], 0)[0]
            two.check_undisturbed()
        two.a.transport.tick(due_s)
        with two.admit(friend):
            two.check_undisturbed("Came")


def test_a_process_that_stood_still_reads_before_it_judges(two: Pair) -> None:
    """Nothing of the agent ran while the answer came, and after its deadline."""
    c = two.world.node("c")
    peer = c.transport.connect(two.b.transport.address)
    due_s = c.transport.tick(time.monotonic())

    c.transport.tick(due_s + 1000)
    two.world.settle(lambda: bool(c.arrived))

    assert c.kinds(peer) == ["Reached"]


def test_names_are_looked_up_without_waiting(two: Pair) -> None:
    port = two.b.transport.address.rpartition(":")[2]

    unknown = two.a.transport.connect(f"{'no' * 40}.invalid:1")
    assert select.select([two.a.transport], [], [], LIMIT_S)[0]
    known = [two.a.transport.connect(f"localhost:{port}") for _ in range(3)]
    two.world.settle(lambda: all(two.a.kinds(each) for each in (*known, unknown)))

    assert [two.a.kinds(each) for each in known] == [["Reached"]] * 3
    (gone,) = (each for each in two.a.arrived if each.peer == unknown)
    assert isinstance(gone, Gone)
    assert "label" in gone.reason


def test_addresses_of_ipv6() -> None:
    world = TcpWorld()
    try:
        a = world.node("a", host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    b = world.node("b", host="::1")
    assert a.transport.address.startswith("[::1]:")

    b.transport.connect(a.transport.address)
    world.settle(lambda: bool(a.arrived and b.arrived))

    assert (a.kinds(), b.kinds()) == (["Came"], ["Reached"])
    world.close()


LOST_HOST = """
import fcntl, socket, struct, sys, time
sys.path.insert(0, sys.argv[1])

def set_loopback(flags):
    with socket.socket() as any:
        fcntl.ioctl(any, 0x8914, struct.pack("16sh", b"lo", flags))

set_loopback(0x1)
from tests.resilience.transports import TcpWorld, say
world = TcpWorld(lease_s=1.0)
a, b = world.node("a"), world.node("b")
peer = a.transport.connect(b.transport.address)
world.settle(lambda: a.arrived and b.arrived)
# With an answer all that was sent is acknowledged, and nothing has to be sent again.
b.transport.send(b.arrived[0].peer, say(1))
world.settle(lambda: a.heard())
set_loopback(0)
began_s = time.monotonic()
if sys.argv[2] == "talks":
    a.transport.send(peer, say(1))
world.settle(lambda: len(a.arrived) == 3)
print(a.arrived[2], round(time.monotonic() - began_s, 1))
"""


@pytest.mark.parametrize("which", ["talks", "silent"])
def test_a_host_that_is_gone_without_a_word_is_noticed_in_time(which: str) -> None:
    """In a network of its own, whose only interface is taken down."""
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", LOST_HOST]
    ended = subprocess.run([*command, ROOT, which], capture_output=True, text=True, timeout=60)
    if "unshare" in ended.stderr:
        pytest.skip(f"no network namespace: {ended.stderr.strip()}")

    assert "Gone" in ended.stdout, ended.stderr
