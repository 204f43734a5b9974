"""Hosts that are network namespaces: what passes between them, and what is left of them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.namespaces import PORT, Network, enter
from tests.processes import LIMIT_S
from tests.scenarios.membership.clusters import MakeNetwork

ROOT = Path(__file__).parents[3]
REFUSED = """
import os
from benchmarks.namespaces import NamespaceError, Network
os.setuid(65534)
try:
    Network(1)
except NamespaceError as error:
    print(error)
"""


def open_socket(network: Network, host: int) -> socket.socket:
    """Return a socket that takes packets on a host."""

    def open_there() -> socket.socket:
        enter(network.path(host))
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    with ThreadPoolExecutor(1) as alone:
        opened = alone.submit(open_there).result()
    opened.bind((network.address(host), PORT))
    opened.settimeout(0.1)
    return opened


@pytest.fixture
def sockets(make_network: MakeNetwork) -> Iterator[tuple[Network, list[socket.socket]]]:
    network = make_network(3)
    opened = [open_socket(network, host) for host in range(3)]
    yield network, opened
    for each in opened:
        each.close()


def gather(
    network: Network,
    sockets: list[socket.socket],
    sender: int,
    receiver: int,
    within_s: float = LIMIT_S,
) -> list[bytes] | None:
    """Say a word until it is heard, and return what is heard before it; None where it never is."""
    word, heard = uuid.uuid4().bytes, list[bytes]()
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        with suppress(OSError):  # the kernel has noticed that nobody is there
            sockets[sender].sendto(word, (network.address(receiver), PORT))
        with suppress(TimeoutError):
            while (each := sockets[receiver].recv(64)) != word:
                heard.append(each)
            return heard
    return None


def hears(network: Network, sockets: list[socket.socket], sender: int, receiver: int) -> bool:
    return gather(network, sockets, sender, receiver) is not None


def is_deaf(network: Network, sockets: list[socket.socket], sender: int, receiver: int) -> bool:
    return gather(network, sockets, sender, receiver, within_s=0.3) is None


def test_hosts_hear_each_other_unless_they_are_cut_off(
    sockets: tuple[Network, list[socket.socket]],
) -> None:
    network, _ = sockets
    assert hears(*sockets, 0, 1)
    assert hears(*sockets, 1, 0)

    network.cut(1)
    assert is_deaf(*sockets, 0, 1)
    assert is_deaf(*sockets, 1, 2)
    assert hears(*sockets, 2, 0)

    network.split([0, 1], [2])
    assert hears(*sockets, 0, 1)
    assert is_deaf(*sockets, 1, 2)

    network.heal()
    assert hears(*sockets, 1, 2)


def test_packets_are_late_or_lost(sockets: tuple[Network, list[socket.socket]]) -> None:
    network, (sender, *_) = sockets
    assert hears(*sockets, 0, 1)  # from here on they know where the other one is

    network.delay_s = 0.05
    begin_s = time.monotonic()
    assert hears(*sockets, 0, 1)
    assert time.monotonic() - begin_s >= network.delay_s

    network.delay_s, network.loss = 0.0, 0.5
    words = [b"%d" % number for number in range(200)]
    for word in words:
        sender.sendto(word, (network.address(1), PORT))
    came = [word for word in gather(*sockets, 0, 1) or () if word in words]
    assert 50 < len(came) < 150
    assert came == [word for word in words if word in came]


def test_machine_that_refuses_namespaces_is_named() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert ended.stdout == (
        "network namespaces are refused here, they need root and /dev/net/tun: "
        "[Errno 1] Operation not permitted\n"
    ), ended.stderr
