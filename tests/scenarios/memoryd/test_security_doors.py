"""Strangers at the doors of a real daemon: refused rightly, and everybody else is served."""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from resilience.runtime.records import fields_of
from resilience.tiered.errors import LostError
from resilience.tiered.frames import FrameSocket
from tests.resilience.tiered.daemons import LIMIT_S, MIB, ask, make_content, make_id, save
from tests.resilience.tiered.http_client import head, shard_meta, shard_path
from tests.resilience.tiered.kept import wait_until
from tests.resilience.tiered.memoryd.test_peers import hello
from tests.scenarios.memoryd.guarded import (
    BEARER,
    BUDGET_MIB,
    EXTRA_BYTES,
    TOKEN,
    Guarded,
    is_ended,
    local_hello,
    make_guarded,
)

NUM_CONNECTIONS = 1000


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    (tmp_path / "disk").mkdir()
    with make_guarded(tmp_path, "--store", f"folder:{tmp_path / 'disk' / 'store'}") as opened:
        yield opened


@pytest.mark.slow
def test_what_is_too_large_costs_no_memory(guarded: Guarded) -> None:
    worker, aws = guarded.log_in()
    guarded.serve(worker, aws)
    before = guarded.pss_bytes()
    words = {"Shard_Meta": shard_meta(b""), "Authorization": BEARER}
    for length in (BUDGET_MIB * MIB + 1, 1 << 40, (1 << 63) - 1):
        with guarded.http() as client:
            client.send(
                head("POST", shard_path("theirs", 0, 1), Content_Length=str(length), **words)
            )
            assert client.answer().status == 413
    with guarded.http() as client:
        client.send(b"GET / HTTP/1.1\r\nX: " + b"y" * (1 << 20))
        assert client.answer().status == 431
    for connection in (guarded.local(), guarded.peer()):
        connection.socket.sendall(struct.pack(">I", (1 << 32) - 1))
        assert connection.receive(timeout_s=LIMIT_S).message["error"] == "invalid"
        assert is_ended(connection)
    for size in (BUDGET_MIB * MIB + 1, 1 << 50, (1 << 63) - 1):
        begin = {"op": "begin", "step": 999, "generation": 0, "shard": "0", "num_shards": 1}
        assert ask(guarded.known_local(), {**begin, "num_bytes": size})["error"] == "full"

    assert guarded.pss_bytes() < before + EXTRA_BYTES
    guarded.serve(worker, aws)


def frames_of(door: str) -> list[dict[str, Any]]:
    """Return right requests of a door, to be made wrong."""
    if door == "local":
        shard = {"step": 1, "generation": 0, "shard": "0"}
        return [
            local_hello(TOKEN),
            {"op": "begin", **shard, "num_shards": 1, "num_bytes": 10},
            {"op": "commit", "segment": 0, "meta": {"format": 1}},
            {"op": "read", **shard},
            {"op": "bad", "segment": 1},
            {"op": "steps"},
            {"op": "status"},
        ]
    shard = fields_of(make_id())
    row = {"meta_id": shard, "num_shards": 1, "digest": "d", "num_bytes": 3}
    complete = {"run": [{"step": 1, "generation": 0}]}
    return [
        hello(),
        {"op": "inventory", "copies": [row | {"place": "", "tier": "ram"}], "jobs": {"run": "job"}},
        {"op": "changes", "copies": [], "gone": [shard], "complete": complete},
        {"op": "fetch", "shard": shard, "job": "job"},
        {"op": "push", "shard": {"format": 1}, "origin": "b", "job": "job"},
    ]


def spoil(rng: random.Random, value: Any) -> Any:
    """Put something else into a value, deep inside or in its place."""
    if rng.random() < 0.3:
        return rng.choice([None, True, -1, 1 << 70, 1.5, "", "x" * 300, [], {}, [[]], "\ud800"])
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {**value, key: spoil(rng, value[key])}
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        return [*value[:place], spoil(rng, value[place]), *value[place + 1 :]]
    return rng.choice([None, -5, "other", 1 << 62, {"a": []}])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_garbage_at_each_door(guarded: Guarded, seed: int) -> None:
    rng = random.Random(seed)
    worker, aws = guarded.log_in()
    guarded.serve(worker, aws)
    before = guarded.pss_bytes()
    for _ in range(150):
        for door, connection in (("local", guarded.local()), ("peer", guarded.peer())):
            first, *others = frames_of(door)
            _say_wrong(rng, connection, [first, rng.choice(others)])
            connection.close()
        with guarded.http() as client, suppress(OSError):
            client.send(_wrong_request(rng))
            client.socket.shutdown(socket.SHUT_WR)
            while client.socket.recv(1 << 16):
                pass

    assert guarded.pss_bytes() < before + EXTRA_BYTES
    guarded.serve(worker, aws)
    assert "Traceback" not in guarded.end()


def _say_wrong(rng: random.Random, connection: FrameSocket, messages: list[dict[str, Any]]) -> None:
    """Say one wrong thing, or all but one right; whatever comes back is fine."""
    with suppress(OSError, ValueError):
        place = rng.randrange(len(messages))
        for number, message in enumerate(messages):
            if number < place:
                connection.send(message, timeout_s=LIMIT_S)
                connection.receive(timeout_s=LIMIT_S, takes_files=True).close()
            elif rng.random() < 0.7:
                connection.send(_fields(spoil(rng, message)), timeout_s=LIMIT_S)
            else:
                connection.socket.sendall(rng.randbytes(rng.randrange(1, 4000)))
        connection.socket.shutdown(socket.SHUT_WR)
        while connection.socket.recv(1 << 16):
            pass


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"op": value}


def _wrong_request(rng: random.Random) -> bytes:
    meta = shard_meta(b"abc")
    right = head("POST", shard_path("theirs", 0, 1), Content_Length="3", Shard_Meta=meta)
    data = bytearray(right[:-2] + f"Authorization: {BEARER}\r\n\r\nabc".encode())
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[place] = rng.randrange(256)
        else:
            data[place:place] = rng.randbytes(rng.randrange(1, 200))
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["local", "http", "peer"])
def test_a_thousand_connections(guarded: Guarded, door: str) -> None:
    worker, aws = guarded.log_in()
    guarded.serve(worker, aws)
    before = guarded.pss_bytes()
    with ExitStack() as stack:
        strangers = []
        for _ in range(NUM_CONNECTIONS):
            strangers.append(stranger := _connect(guarded, door))
            stack.callback(stranger.close)
        refused = [answer for each in strangers if (answer := _read_refusal(each)) is not None]

        assert len(refused) >= NUM_CONNECTIONS - 600
        assert set(refused) == {{"local": "busy", "http": "", "peer": ""}[door]}
        assert guarded.pss_bytes() < before + EXTRA_BYTES
        guarded.serve(worker, aws)

    wait_until(lambda: _is_admitted(guarded, door))
    guarded.serve(worker, aws)
    assert "Traceback" not in guarded.end()


def _connect(guarded: Guarded, door: str) -> socket.socket:
    if door == "local":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(LIMIT_S)
        connection.connect(str(guarded.daemon.socket_path))
        return connection
    port = guarded.http_port if door == "http" else guarded.cluster.ports["a"]
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def _read_refusal(connection: socket.socket) -> str | None:
    """Return what a refused one is told; None for one that is let in."""
    connection.settimeout(0.002)
    try:
        data = connection.recv(1 << 16)
    except TimeoutError:
        return None
    if data.startswith(b"HTTP/1.1 "):
        return data.split()[1].decode()
    return "busy" if b'"busy"' in data else data.decode()


def _is_admitted(guarded: Guarded, door: str) -> bool:
    """Try to come in once, as somebody who may."""
    try:
        if door == "local":
            guarded.daemon.client().steps()
        elif door == "peer":
            guarded.known_peer()
        else:
            with guarded.http() as client:
                path = "/v1/cp/namespaces/theirs"
                return client.ask("GET", path, Authorization=BEARER).status == 200
    except (LostError, OSError):
        return False
    return True


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    """Whatever the umask: the folder is 0700, and all in it 0600."""
    with make_guarded(tmp_path) as guarded:
        guarded.daemon.end()
        before = ("sh", "-c", 'umask 0; exec "$@"', "sh")
        guarded.daemon.start("--http", f"127.0.0.1:{guarded.http_port}", before=before)
        worker, aws = guarded.log_in()
        guarded.serve(worker, aws)
        body = make_content(MIB)
        path, meta = shard_path("theirs", 0, 1), shard_meta(body)
        assert aws.ask("POST", path, body, Shard_Meta=meta, Authorization=BEARER).status == 200
        save(guarded.cluster["b"].client(), make_id(50), make_content(MIB, 50))
        wait_until((guarded.daemon.folder / "copies.json").exists)

        modes = {each.name: _mode(each) for each in guarded.daemon.folder.iterdir()}

        assert _mode(guarded.daemon.folder) == 0o700
        assert {"memoryd.sock", "lock", "jobs.json", "copies.json"} < modes.keys()
        assert any(each.startswith("segment-") and each.endswith(".meta") for each in modes)
        assert {name: mode for name, mode in modes.items() if mode != 0o600} == {}


def _mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)
