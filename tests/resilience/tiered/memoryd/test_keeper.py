"""What real daemons keep, drop and send to a store, by themselves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import TierError, VaultFullError
from tests.ports import free_ports
from tests.resilience.tiered.daemons import (
    MIB,
    Daemon,
    load,
    make_content,
    make_id,
    save,
)
from tests.resilience.tiered.http_client import Client
from tests.resilience.tiered.kept import NODE, held, stored, wait_until, waiting
from tests.resilience.tiered.s3_server import ENVIRONMENT


def make_daemon(tmp_path: Path, *options: str, budget_mib: int = 16) -> Daemon:
    return Daemon(
        folder=tmp_path / "arena", budget_mib=budget_mib, options=[*NODE, *options]
    ).start()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "store"


@pytest.fixture
def client(tmp_path: Path, store: Path) -> Iterator[TieredClient]:
    """Return a client of a daemon with a folder as its store."""
    store.parent.mkdir()
    with make_daemon(tmp_path, "--store", f"folder:{store}") as daemon:
        yield daemon.client()


def test_what_an_earlier_daemon_left_is_looked_through(tmp_path: Path) -> None:
    with make_daemon(tmp_path, "--keep", "5") as daemon:
        for step in range(1, 4):
            save(daemon.client(), make_id(step), make_content(MIB, step))
        daemon.kill()

        client = daemon.start("--keep", "1").client()

        wait_until(lambda: held(client) == [3], client.status)


def test_the_store_gets_the_steps_that_are_due_and_keeps_the_newest(
    tmp_path: Path, store: Path
) -> None:
    store.parent.mkdir()
    words = ("--store", f"folder:{store}", "--store-every-n-steps", "3", "--store-keep", "2")
    with make_daemon(tmp_path, *words) as daemon:
        client = daemon.client()
        for step in range(1, 14):
            save(client, make_id(step), make_content(MIB // 4, step))

        def is_settled() -> bool:
            steps = {each.parent.name for each in stored(store, "steps")}
            return steps == {"000000000012-g0", "000000000009-g0"} and len(stored(store)) == 2

        wait_until(is_settled, client.status)
        wait_until(lambda: held(client) == [13], client.status)


def test_a_store_that_hangs_holds_back_what_it_has_to_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = (
            *("--store", "s3://bucket/runs", "--store-path-style"),
            *("--store-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}"),
            *("--store-deadline-s", "0.5", "--drain-s", "0.5"),
        )
        with make_daemon(tmp_path, *words, budget_mib=3) as daemon:
            client = daemon.client()
            for step in (1, 2, 3):
                save(client, make_id(step), make_content(MIB, step))

            with pytest.raises(VaultFullError, match=r"nothing may go: .*s3 has to get it"):
                save(client, make_id(4), make_content(MIB, 4))

            assert held(client) == waiting(client)[::-1] == [3, 2, 1]
            assert [each.step for each in client.steps()] == [3, 2, 1]
            assert load(client, make_id(3)) == make_content(MIB, 3)
            with pytest.raises(TierError, match=r"no answer within 0\.5 s|hang still"):
                load(client, make_id(9))
            assert daemon.end() == 3


@pytest.mark.slow
def test_tiny_shards_make_room_for_each_other(tmp_path: Path) -> None:
    with make_daemon(tmp_path, "--keep", "9999", budget_mib=1) as daemon:
        client = daemon.client()
        for step in range(1, 300):
            save(client, make_id(step), b"%d" % step)

        assert held(client)[0] == 299
        assert len(held(client)) == 256


def test_a_flipped_bit_in_memory_is_not_sent(
    tmp_path: Path, store: Path, client: TieredClient
) -> None:
    store.parent.rename(tmp_path / "away")
    content = make_content(MIB)
    save(client, make_id(1), content)
    (segment,) = (tmp_path / "arena").glob("segment-?")
    with segment.open("r+b") as file:
        file.seek(MIB // 2)
        file.write(bytes([content[MIB // 2] ^ 1]))

    (tmp_path / "away").rename(store.parent)

    wait_until(lambda: held(client) == [], client.status)
    assert stored(store) == stored(store, "steps") == []


def test_a_shard_over_http_may_take_the_room_of_older_steps(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ("--http", f"127.0.0.1:{port}", "--keep", "9")
    with make_daemon(tmp_path, *words, budget_mib=3) as daemon:
        client = daemon.client()
        for step in (1, 2, 3):
            save(client, make_id(step), make_content(MIB, step))

        with Client(("127.0.0.1", port)) as aws:
            aws.create("theirs", 1)
            assert aws.put("theirs", 0, 1, make_content(2 * MIB)).status == 200
            assert held(client) == [3]
            assert aws.put("theirs", 0, 2, make_content(2 * MIB)).status == 507
            with pytest.raises(VaultFullError):
                save(client, make_id(4), make_content(MIB, 4))
        with Client(("127.0.0.1", port)) as aws:
            assert aws.get("theirs", 0, 1).body == make_content(2 * MIB)
