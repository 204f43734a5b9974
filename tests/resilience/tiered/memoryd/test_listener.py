"""Strangers at the port where a daemon listens for others, and at the address of one of those."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from resilience.runtime.door import DAEMONS
from resilience.runtime.server import Credentials
from resilience.runtime.tls import derive_tls
from resilience.tiered.memoryd.listener import Listener, listen_at
from tests.resilience.tiered.cluster import Cluster, make_cluster, wait_held
from tests.resilience.tiered.daemons import LIMIT_S, MIB, ask, make_content, make_id, save
from tests.resilience.tiered.kept import wait_until
from tests.resilience.tiered.memoryd.test_peers import connect, hello, knock, make_door
from tests.tokens import write_token

TOKEN = "a token that no stranger knows"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    write_token(tmp_path / "token", TOKEN)
    words = ("--token-file", str(tmp_path / "token"), "--peer-gone-s", "2")
    with make_cluster(tmp_path, options=words) as cluster:
        for each in cluster.nodes.values():
            each.token = TOKEN
        yield cluster


def test_a_stranger_at_a_peers_address_hears_no_token(pair: Cluster) -> None:
    """It hears the first line of the door, and no more once its own proof was wrong."""
    with socket.create_server(("127.0.0.1", pair.ports["b"])) as listening:
        pair.start("a")
        accepted, _ = listening.accept()
        with accepted:
            accepted.settimeout(LIMIT_S)
            door = make_door("another", connects=False)
            heard = accepted.recv(door.num_wanted)
            accepted.sendall(door.feed(heard))
            while data := accepted.recv(1 << 16):
                heard += data

    assert len(heard) == len(make_door().opening)
    assert TOKEN.encode() not in heard


def test_two_daemons_find_each_other_through_a_flood(pair: Cluster) -> None:
    """Strangers that say nothing, half of a line or a wrong one hold all places from one host."""
    is_over = threading.Event()

    def flood(port: int) -> None:
        waiting: list[socket.socket] = []
        while not is_over.is_set():
            with suppress(OSError):
                waiting.append(knock(port))
                waiting[-1].sendall(secrets.choice([b"", b"daemon", bytes(56)]))
            if len(waiting) > 300:
                waiting.pop(0).close()
        for each in waiting:
            each.close()

    floods = [threading.Thread(target=flood, args=[port]) for port in pair.ports.values()]
    try:
        pair["a"].start("--tls")
        for each in floods:
            each.start()
        pair["b"].start("--tls")
        for step in range(1, 4):
            save(pair["a"].client(token=TOKEN), make_id(step), make_content(MIB, step))
            wait_held(pair["b"], make_id(step))
    finally:
        is_over.set()
        for each in floods:
            each.join()


def test_strangers_leave_a_daemon_most_of_its_descriptors(pair: Cluster) -> None:
    for each in pair.nodes.values():
        each.start(before=["bash", "-c", 'ulimit -n 100; exec "$@"', "bash"])
    with ExitStack() as strangers:
        for number in range(1, 120):
            address = ("127.0.0.1", pair.ports["a"])
            stranger = socket.create_connection(address, LIMIT_S, (f"127.0.2.{number}", 0))
            strangers.enter_context(stranger)
        save(pair["a"].client(), make_id(), make_content(MIB))
        wait_held(pair["b"], make_id())

    pair["a"].end()
    assert "Too many open files" not in pair["a"].outputs[-1]


def test_a_node_comes_back_after_another_with_its_name_has_left(pair: Cluster) -> None:
    pair.start()
    client = pair["a"].client(None)
    wait_until(lambda: "b" in client.status()["nodes"])
    with closing(connect(pair.ports["a"], TOKEN)) as other:
        assert ask(other, hello(is_link=True))["node"] == "a"
        assert "b" not in client.status()["nodes"]

    wait_until(lambda: "b" in client.status()["nodes"])


def test_tls_encrypts_the_last_answer_of_a_daemon_that_ends() -> None:
    tls, answer = derive_tls(TOKEN), secrets.token_bytes(4096)

    def serve(accepted: socket.socket) -> None:
        accepted.sendall(b"ready")
        socket.socket.recv(accepted, 1)  # until the listener hangs up
        accepted.sendall(answer)

    listener = Listener(
        "test",
        serve,
        complaint="cannot accept",
        connections_max=1,
        lead=Credentials(kind=DAEMONS, token=TOKEN, tls=tls).accept,
    )
    listening = listen_at("127.0.0.1", 0)
    with knock(listening.getsockname()[1]) as client:
        listener.start(listening)
        passage = Credentials(kind=DAEMONS, token=TOKEN, tls=tls).lead(client, connects=True)
        connection = passage.go_through(LIMIT_S)
        connection.settimeout(LIMIT_S)
        assert connection.recv(16) == b"ready"
        listener.close()
        with socket.socket(fileno=connection.detach()) as wire:
            sent = b"".join(iter(lambda: wire.recv(1 << 16), b""))

    assert len(sent) > len(answer)
    assert answer not in sent
