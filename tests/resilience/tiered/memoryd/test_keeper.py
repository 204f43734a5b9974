"""What real daemons keep, drop and send to a store, by themselves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import TierError, VaultFullError
from resilience.tiered.memoryd.options import parse_options
from resilience.tiered.stores.folder import FolderSettings
from resilience.tiered.stores.s3 import S3Settings
from tests.ports import free_ports
from tests.resilience.tiered.daemons import (
    MIB,
    Daemon,
    load,
    make_content,
    make_id,
    save,
)
from tests.resilience.tiered.fault_proxy import Fault, fault_proxy
from tests.resilience.tiered.http_client import Client
from tests.resilience.tiered.kept import NODE, held, say, stored, wait_until, waiting
from tests.resilience.tiered.s3_server import ENVIRONMENT, S3Server

TEXT = b"a file that a folder cannot be made in"


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


def wait_for_store(client: TieredClient, step: int) -> None:
    """Wait until the store has a step, and nothing more is to be sent."""

    def is_there() -> bool:
        spaces = client.status()["store"]["namespaces"]
        return spaces.get("run", {}).get("newest_step") == step and not waiting(client)

    wait_until(is_there, client.status)


def test_newest_complete_steps_stay_and_others_go(tmp_path: Path) -> None:
    with make_daemon(tmp_path, "--keep", "2") as daemon:
        client = daemon.client()
        for step in range(1, 6):
            save(client, make_id(step), make_content(MIB, step))

        wait_until(lambda: held(client) == [5, 4], client.status)
        assert client.status()["held_bytes"] == 2 * MIB
        assert client.status()["store"] is None
        assert load(client, make_id(4)) == make_content(MIB, 4)


def test_a_step_goes_only_when_a_newer_one_is_complete(tmp_path: Path) -> None:
    with make_daemon(tmp_path) as daemon:
        client = daemon.client()
        for step in (1, 2):
            save(client, make_id(step, "0"), make_content(MIB, step), num_shards=2)
            if step == 1:
                save(client, make_id(step, "1"), make_content(MIB, 10), num_shards=2)
        assert [each.step for each in client.steps()] == [1]

        save(client, make_id(2, "1"), make_content(MIB, 20), num_shards=2)

        wait_until(lambda: held(client) == [2], client.status)
        assert [each.step for each in client.steps()] == [2]


def test_what_an_earlier_daemon_left_is_looked_through(tmp_path: Path) -> None:
    with make_daemon(tmp_path, "--keep", "5") as daemon:
        for step in range(1, 4):
            save(daemon.client(), make_id(step), make_content(MIB, step))
        daemon.kill()

        client = daemon.start("--keep", "1").client()

        wait_until(lambda: held(client) == [3], client.status)


def test_a_newer_generation_clears_the_older_ones_steps(tmp_path: Path) -> None:
    with make_daemon(tmp_path, "--keep", "9") as daemon:
        client = daemon.client()
        for step in (3, 4, 5):
            save(client, make_id(step), make_content(MIB, step))

        save(client, make_id(4, generation=1), make_content(MIB, 14))

        wait_until(lambda: held(client) == [4, 3], client.status)
        offered = [(each.step, each.generation) for each in client.steps()]
        assert offered == [(4, 1), (3, 0)]


def test_each_digest_is_sent_once(store: Path, client: TieredClient) -> None:
    for step in (1, 2):
        for shard in ("0", "1", "2"):
            content = make_content(MIB, 7 if shard != "2" else step)
            save(client, make_id(step, shard), content, num_shards=3)

    wait_for_store(client, 2)

    assert len(stored(store)) == 3
    assert len(stored(store, "steps")) == 6


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


@pytest.mark.slow
def test_a_store_that_fails_stops_no_save_and_gets_all_steps_later(
    tmp_path: Path, store: Path
) -> None:
    store.parent.write_bytes(TEXT)
    with make_daemon(tmp_path, "--store", f"folder:{store}") as daemon:
        client = daemon.client()
        for step in (1, 2, 3):
            save(client, make_id(step), make_content(MIB, step))

        wait_until(lambda: client.status()["store"]["last_error"], client.status)
        assert "Not a directory" in say(client)
        assert client.status()["store"]["failing_s"] >= 0
        assert waiting(client) == [1, 2, 3] == held(client)[::-1]
        assert [each.step for each in client.steps()] == [3, 2, 1]
        assert load(client, make_id(1)) == make_content(MIB, 1)

        store.parent.unlink()
        store.parent.mkdir()

        wait_for_store(client, 3)
        wait_until(lambda: held(client) == [3], client.status)
        assert client.status()["store"]["failing_s"] is None
        assert len(stored(store)) == 3
        daemon.end()
        assert "Not a directory" in daemon.outputs[0]


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


def test_steps_may_be_left_out_for_a_slow_store(tmp_path: Path, store: Path) -> None:
    store.parent.write_bytes(TEXT)
    words = ("--store", f"folder:{store}", "--store-waiting-max", "1")
    with make_daemon(tmp_path, *words, budget_mib=3) as daemon:
        client = daemon.client()
        for step in range(1, 8):
            save(client, make_id(step), make_content(MIB, step))

        assert held(client)[0] == 7


def test_older_complete_steps_make_room(tmp_path: Path) -> None:
    with make_daemon(tmp_path, "--keep", "9", budget_mib=3) as daemon:
        client = daemon.client()
        for step in range(1, 8):
            save(client, make_id(step), make_content(MIB, step))
            assert client.status()["total_bytes"] <= 3 * MIB

        assert held(client) == [7, 6, 5]


def test_a_save_that_does_not_fit_is_refused_and_the_daemon_lives(tmp_path: Path) -> None:
    with make_daemon(tmp_path, budget_mib=3) as daemon:
        client = daemon.client()
        save(client, make_id(1), make_content(2 * MIB, 1))

        with pytest.raises(VaultFullError, match=r"nothing may go: .* the newest complete step"):
            save(client, make_id(2), make_content(2 * MIB, 2))

        assert load(client, make_id(1)) == make_content(2 * MIB, 1)
        save(client, make_id(3), make_content(MIB, 3))
        wait_until(lambda: held(client) == [3], client.status)


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


@pytest.mark.slow
def test_uploads_go_on_after_a_kill(tmp_path: Path, server: S3Server) -> None:
    server.make_bucket("kills")
    words = ("--store", "s3://kills/a/b", "--store-endpoint", server.endpoint)
    with make_daemon(tmp_path, *words) as daemon:
        save(daemon.client(), make_id(1), make_content(8 * MIB, 1))
        daemon.kill()

        client = daemon.start().client()

        wait_for_store(client, 1)


@pytest.mark.slow
def test_uploads_go_on_when_the_way_to_s3_is_mended(tmp_path: Path, server: S3Server) -> None:
    server.make_bucket("faults")
    with fault_proxy(server.port) as proxy:
        proxy.begin(Fault("status"))
        words = ("--store", "s3://faults", "--store-endpoint", proxy.endpoint)
        with make_daemon(tmp_path, *words, "--store-attempts", "1") as daemon:
            client = daemon.client()
            save(client, make_id(1), make_content(8 * MIB, 1))
            wait_until(lambda: client.status()["store"]["last_error"], client.status)
            assert "s3:faults" in client.status()["store"]["name"]

            proxy.begin(Fault("cut_up", times=3, after_bytes=4 * MIB))

            wait_for_store(client, 1)
            assert client.status()["store"]["failing_s"] is None


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--store", "s3://"], "'s3://' is neither folder:PATH nor s3://BUCKET"),
        (["--store", "/tmp"], "'/tmp' is neither"),
        (["--store", "folder:"], "'folder:' is neither"),
        (["--store-keep", "1"], "--store: has to be given with"),
        (["--store", "folder:x", "--store-path-style"], "are of s3:// alone"),
        (["--store", "s3://b", "--store-endpoint", "here"], "'here': allowed: http://"),
        (["--store", "s3://b", "--store-part-size-mib", "1"], "not within 5 and 5120"),
        (["--store", "s3://b", "--store-every-s", "0"], "'0': Input should be greater than 0"),
        (
            ["--store", "s3://b", "--store-every-s", "1", "--store-every-n-steps", "1"],
            "not allowed with --store-every-n-steps",
        ),
        (["--keep", "0"], "'0': Input should be greater"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--budget-mib", "1", *words])

    assert message in capsys.readouterr().err


def test_options_of_a_store_are_read(tmp_path: Path) -> None:
    def read(*words: str) -> Any:
        return parse_options(["--budget-mib", "1", *words]).kept

    assert read().store is None
    assert (read().settings.keep, read().settings.domains_min) == (1, 2)
    folder = read("--store", f"folder:{tmp_path}", "--store-deadline-s", "5")
    assert folder.store == FolderSettings(folder=tmp_path, deadline_s=5)
    assert folder.settings.lower["folder"].cadence.every_n_steps == 1
    s3 = read(
        *("--store", "s3://bucket/a/b", "--store-region", "eu-north-1", "--store-path-style"),
        *("--store-part-size-mib", "8", "--store-attempts", "2", "--store-every-s", "60"),
        *("--store-keep", "3", "--store-waiting-max", "2"),
    )
    assert s3.store == S3Settings(
        bucket="bucket",
        prefix="a/b",
        region="eu-north-1",
        force_path_style=True,
        part_size_mib=8,
        attempts=2,
    )
    tier = s3.settings.lower["s3"]
    assert (tier.cadence.every_s, tier.keep, tier.waiting_max) == (60.0, 3, 2)
