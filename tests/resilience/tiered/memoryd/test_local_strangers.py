"""Who may not come in, and what nobody may say: the daemon refuses it and lives."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import LostError, RefusedError
from resilience.tiered.frames import FrameSocket
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    Daemon,
    load,
    make_id,
    save,
    wait_for_connections,
)
from tests.tokens import TOKEN, write_token

NOBODY = 65534


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(folder=tmp_path / "arena").start() as each:
        yield each


@pytest.fixture
def client(daemon: Daemon) -> TieredClient:
    return daemon.client()


def test_the_token_has_to_be_known(tmp_path: Path) -> None:
    write_token(tmp_path / "token", f"{TOKEN}\n")
    with Daemon(
        folder=tmp_path / "arena", options=["--token-file", str(tmp_path / "token")]
    ).start() as daemon:
        for token in ("", TOKEN[:-1], f"{TOKEN}\n", f"\u00e9{TOKEN}"):
            with pytest.raises(RefusedError, match="wrong token"):
                daemon.client(token=token).steps()
        save(daemon.client(token=TOKEN), make_id(1), b"hello")


def test_a_namespace_of_another_job_is_refused_also_after_a_restart(
    daemon: Daemon, client: TieredClient
) -> None:
    save(client, make_id(1), b"hello")
    for _ in range(2):
        with pytest.raises(RefusedError, match="belongs to the job 'job', not to 'thief'"):
            daemon.client(job="thief").steps()
        assert daemon.client(job="thief", namespace="own").steps() == []
        daemon.kill()
        daemon.start()
    assert load(client, make_id(1)) == b"hello"


@pytest.mark.parametrize("namespace", ["", "../x", "a/b", "a\0b", "http:x", "x" * 201, ".."])
def test_strange_namespaces_are_refused(daemon: Daemon, namespace: str) -> None:
    with pytest.raises(ValueError, match=r"namespace .* is not allowed; want 1 to 200"):
        daemon.client(namespace).steps()


def test_without_a_namespace_only_the_status_is_told(daemon: Daemon, client: TieredClient) -> None:
    save(client, make_id(1), b"hello", num_shards=3)
    guest = daemon.client(None)

    assert guest.status()["namespaces"] == {
        "run": [{"step": 1, "generation": 0, "num_shards": 3, "num_held": 1, "num_bytes": 5}]
    }
    with pytest.raises(ValueError, match="has no namespace"):
        guest.steps()


def test_what_answers_has_to_be_a_memoryd(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "other"))
        server.listen()
        client = TieredClient(tmp_path / "other")
        with pytest.raises(LostError):
            client.status(timeout_s=0.2)


def ask(connection: FrameSocket, message: dict[str, Any]) -> dict[str, Any]:
    connection.send(message, timeout_s=LIMIT_S)
    return connection.receive(timeout_s=LIMIT_S).message


HELLO = {"op": "hello", "namespace": "run", "job": "job"}


@pytest.mark.parametrize("is_known", [False, True], ids=["stranger", "worker"])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff" * 64, id="noise"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(struct.pack(">I", 16 * MIB + 1), id="oversized"),
        pytest.param(struct.pack(">I", 2) + b"[]", id="list"),
        pytest.param(struct.pack(">I", 0), id="empty"),
        pytest.param(struct.pack(">I", 3) + b"{x}", id="no-json"),
        pytest.param(struct.pack(">I", 60_000) + b"[" * 60_000, id="deep"),
        pytest.param(struct.pack(">I", 5) + b"\x80\x04K\x01.", id="pickle"),
    ],
)
def test_garbage_is_refused_and_the_connection_ended(
    daemon: Daemon, client: TieredClient, data: bytes, is_known: bool
) -> None:
    connection = daemon.connect()
    if is_known:
        assert ask(connection, HELLO)["version"] == 1
    connection.socket.sendall(data)

    assert connection.receive(timeout_s=LIMIT_S).message["error"] == "invalid"
    with pytest.raises(ConnectionError):
        connection.receive(timeout_s=LIMIT_S)
    save(client, make_id(1), b"hello")


def test_a_stranger_may_not_say_much(daemon: Daemon) -> None:
    connection = daemon.connect()

    reply = ask(connection, {**HELLO, "token": "x" * 100_000})

    assert reply["error"] == "invalid"
    assert "is longer than 65536" in reply["message"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        pytest.param({}, "refused", id="empty"),
        pytest.param({"op": "status"}, "refused", id="no-hello"),
        pytest.param({**HELLO, "namespace": 1}, "invalid", id="namespace"),
        pytest.param({**HELLO, "job": ""}, "invalid", id="no-job"),
        pytest.param({**HELLO, "job": "x" * 300}, "invalid", id="long-job"),
    ],
)
def test_the_first_request_has_to_be_a_right_hello(
    daemon: Daemon, message: dict[str, Any], error: str
) -> None:
    connection = daemon.connect()

    assert ask(connection, message)["error"] == error
    with pytest.raises(ConnectionError):
        connection.receive(timeout_s=LIMIT_S)


BEGIN = {"op": "begin", "step": 1, "generation": 0, "shard": "0", "num_shards": 1, "num_bytes": 5}


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"op": "jump"}, id="op"),
        pytest.param({"op": ["begin"]}, id="op-list"),
        pytest.param(HELLO, id="second-hello"),
        pytest.param({"op": "begin"}, id="no-fields"),
        pytest.param({**BEGIN, "step": -1}, id="negative-step"),
        pytest.param({**BEGIN, "step": 1 << 70}, id="huge-step"),
        pytest.param({**BEGIN, "step": True}, id="boolean"),
        pytest.param({**BEGIN, "num_shards": 0}, id="no-shards"),
        pytest.param({**BEGIN, "num_bytes": -1}, id="negative-size"),
        pytest.param({**BEGIN, "num_bytes": "5"}, id="text-size"),
        pytest.param({**BEGIN, "shard": 0}, id="shard-number"),
        pytest.param({**BEGIN, "shard": "x" * 300}, id="long-shard"),
        pytest.param({**BEGIN, "step": 10**12}, id="step-beyond-names"),
        pytest.param({"op": "commit", "segment": 5, "meta": {}}, id="commit-of-nothing"),
        pytest.param({"op": "bad", "segment": 5}, id="bad-of-nothing"),
        pytest.param({"op": "release"}, id="release-of-no-number"),
    ],
)
def test_a_wrong_request_is_refused_and_the_connection_lives(
    daemon: Daemon, message: dict[str, Any]
) -> None:
    connection = daemon.connect()
    ask(connection, HELLO)

    assert ask(connection, message)["error"] == "invalid"
    assert ask(connection, {"op": "status"})["total_bytes"] == 0


def test_a_commit_with_a_wrong_description_is_an_abort(
    daemon: Daemon, client: TieredClient
) -> None:
    connection = daemon.connect()
    ask(connection, HELLO)
    for meta in (None, {}, {"format": 1}, []):
        segment = ask(connection, BEGIN)["segment"]
        assert segment == 0
        reply = ask(connection, {"op": "commit", "segment": segment, "meta": meta})
        assert reply["error"] == "invalid"

    save(client, make_id(1), b"hello")


def test_too_many_connections_are_told_so(tmp_path: Path) -> None:
    with Daemon(folder=tmp_path / "arena", options=["--connections-max", "20"]).start() as daemon:
        with ExitStack() as stack:
            idle = [daemon.connect() for _ in range(20)]
            for each in idle:
                stack.callback(each.close)
                assert ask(each, HELLO)["version"] == 1
            for _ in range(180):
                refused = daemon.connect()
                stack.callback(refused.close)
                assert refused.receive(timeout_s=LIMIT_S).message["error"] == "busy"
            with pytest.raises(LostError, match="no room for another connection; it takes 20"):
                daemon.client().steps()
            assert ask(idle[0], {"op": "status"})["num_connections"] == 20

        wait_until_admitted(daemon)
        assert daemon.end() == 0


def wait_until_admitted(daemon: Daemon) -> None:
    """Connect until the daemon has noticed that others have gone."""
    for _ in range(10_000):
        try:
            wait_for_connections(daemon.client(), 1)
        except LostError:
            continue
        return
    raise AssertionError("the connections stay")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_a_socket_of_another_user_is_told_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "memoryd.sock"))
        os.seteuid(NOBODY)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        client = TieredClient(tmp_path / "memoryd.sock", token=TOKEN, namespace="run", job="job")
        with pytest.raises(RefusedError, match=f"user {NOBODY} listens at .*memoryd.sock"):
            client.steps()
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(1) == b""
