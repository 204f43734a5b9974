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
from tests.resilience.tiered.daemons import (
    LIMIT_S,
    MIB,
    Daemon,
    ask,
    load,
    make_id,
    save,
    wait_for_connections,
)
from tests.tokens import TOKEN, write_token

NOBODY = 65534


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all: what is refused leaves nothing there."""
    folder = tmp_path_factory.mktemp("daemon") / "arena"
    with Daemon(folder=folder, options=["--keep", "99"]).start() as each:
        yield each


def serve(daemon: Daemon) -> None:
    """Show that a worker is served as ever."""
    with daemon.client("served") as client:
        step = 1 + max((each.step for each in client.steps()), default=0)
        save(client, make_id(step, name="served"), b"hello")


def test_the_token_has_to_be_known(tmp_path: Path) -> None:
    write_token(tmp_path / "token", f"{TOKEN}\n")
    with Daemon(
        folder=tmp_path / "arena", options=["--token-file", str(tmp_path / "token")]
    ).start() as daemon:
        for token in ("", TOKEN[:-1], f"{TOKEN}\n", f"\u00e9{TOKEN}"):
            with pytest.raises(RefusedError, match="wrong token"):
                daemon.client(token=token).steps()
        save(daemon.client(token=TOKEN), make_id(1), b"hello")


def test_a_namespace_of_another_job_is_refused_also_after_a_restart(daemon: Daemon) -> None:
    client = daemon.client("taken")
    save(client, make_id(1, name="taken"), b"hello")
    for _ in range(2):
        with pytest.raises(RefusedError, match="belongs to the job 'job', not to 'thief'"):
            daemon.client("taken", job="thief").steps()
        assert daemon.client(job="thief", namespace="own").steps() == []
        daemon.kill()
        daemon.start()
    assert load(client, make_id(1, name="taken")) == b"hello"


@pytest.mark.parametrize("namespace", ["", "../x", "a/b", "a\0b", "http:x", "x" * 201, ".."])
def test_strange_namespaces_are_refused(daemon: Daemon, namespace: str) -> None:
    with pytest.raises(ValueError, match=r"namespace .* is not allowed; want 1 to 200"):
        daemon.client(namespace).steps()


def test_without_a_namespace_only_the_status_is_told(daemon: Daemon) -> None:
    save(daemon.client("told"), make_id(1, name="told"), b"hello", num_shards=3)
    guest = daemon.client(None)

    assert guest.status()["namespaces"]["told"] == [
        {"step": 1, "generation": 0, "num_shards": 3, "num_held": 1, "num_bytes": 5}
    ]
    with pytest.raises(ValueError, match="has no namespace"):
        guest.steps()


def test_what_answers_has_to_be_a_memoryd(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "other"))
        server.listen()
        client = TieredClient(tmp_path / "other")
        with pytest.raises(LostError):
            client.status(timeout_s=0.2)


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
    daemon: Daemon, data: bytes, is_known: bool
) -> None:
    connection = daemon.connect()
    if is_known:
        assert ask(connection, HELLO)["version"] == 1
    connection.socket.sendall(data)

    assert connection.receive(timeout_s=LIMIT_S).message["error"] == "invalid"
    with pytest.raises(ConnectionError):
        connection.receive(timeout_s=LIMIT_S)
    serve(daemon)


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


WRONG = {
    "op": {"op": "jump"},
    "op-list": {"op": ["begin"]},
    "second-hello": HELLO,
    "no-fields": {"op": "begin"},
    "negative-step": {**BEGIN, "step": -1},
    "huge-step": {**BEGIN, "step": 1 << 70},
    "boolean": {**BEGIN, "step": True},
    "no-shards": {**BEGIN, "num_shards": 0},
    "negative-size": {**BEGIN, "num_bytes": -1},
    "text-size": {**BEGIN, "num_bytes": "5"},
    "shard-number": {**BEGIN, "shard": 0},
    "long-shard": {**BEGIN, "shard": "x" * 300},
    "step-beyond-names": {**BEGIN, "step": 10**12},
    "commit-of-nothing": {"op": "commit", "segment": 5, "meta": {}},
    "bad-of-nothing": {"op": "bad", "segment": 5},
    "release-of-no-number": {"op": "release"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_and_the_connection_lives(daemon: Daemon, name: str) -> None:
    connection = daemon.connect()
    total_bytes = daemon.client(None).status()["total_bytes"]
    ask(connection, HELLO)

    assert ask(connection, WRONG[name])["error"] == "invalid"
    assert ask(connection, {"op": "status"})["total_bytes"] == total_bytes


def test_a_commit_with_a_wrong_description_is_an_abort(daemon: Daemon) -> None:
    connection = daemon.connect()
    ask(connection, HELLO)
    segments = set()
    for meta in (None, {}, {"format": 1}, []):
        segments.add(segment := ask(connection, BEGIN)["segment"])
        reply = ask(connection, {"op": "commit", "segment": segment, "meta": meta})
        assert reply["error"] == "invalid"

    assert len(segments) == 1
    serve(daemon)


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
