"""The local door of real daemons, with real workers: who dies, when, and what is left."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import (
    HeldError,
    LostError,
    StaleError,
    VaultFullError,
)
from tests.resilience.tiered.daemons import (
    MIB,
    Daemon,
    load,
    make_content,
    make_id,
    make_meta,
    save,
    segments,
    wait_for_connections,
)
from tests.scenarios.memoryd.scene import Rank

KEEP_ALL = ("--keep", "1000")
"""So that no step goes while the door is looked at."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(folder=tmp_path / "arena", options=KEEP_ALL).start() as each:
        yield each


@pytest.fixture
def client(daemon: Daemon) -> TieredClient:
    return daemon.client()


def begin(client: TieredClient, step: int, num_bytes: int = MIB, **options: Any) -> Any:
    fields = {"step": step, "generation": 0, "shard": "0", "num_shards": 1, **options}
    return client.begin(num_bytes=num_bytes, **fields)


def test_a_shard_is_saved_and_loaded(client: TieredClient) -> None:
    content = make_content(3 * MIB + 5)
    save(client, make_id(7), content, num_shards=2)
    assert client.steps() == []
    save(client, make_id(7, "1"), b"hello", num_shards=2)

    with client.read(step=7, generation=0, shard="0") as loan:
        assert bytes(loan.memory) == content
        assert loan.meta == make_meta(make_id(7), content, num_shards=2)
        assert loan.source == "ram"
    (step,) = client.steps()
    assert (step.step, step.generation, step.num_shards, step.shards) == (7, 0, 2, ("0", "1"))


def test_memory_stays_mapped_between_saves_and_is_read_where_it_lies(client: TieredClient) -> None:
    begin(client, 1).abort()
    (kept,) = client._maps.values()
    for step in (1, 2):
        begin(client, step).abort()
    save(client, make_id(1), make_content(MIB))

    assert load(client, make_id(1)) == make_content(MIB)
    assert list(client._maps.values()) == [kept]


def test_another_process_has_memory_that_it_cannot_write_to(
    daemon: Daemon, client: TieredClient
) -> None:
    save(client, make_id(1), b"hello")

    with (
        daemon.client() as other,
        other.read(step=1, generation=0, shard="0") as loan,
        pytest.raises(TypeError, match="read-only"),
    ):
        loan.memory[0] = 1


def test_errors_of_the_vault_reach_the_worker(client: TieredClient) -> None:
    save(client, make_id(5, generation=2), b"hello")

    with pytest.raises(HeldError, match="held already"):
        begin(client, 5, generation=2)
    with pytest.raises(StaleError, match="comes too late"):
        begin(client, 4, generation=1)
    with pytest.raises(VaultFullError, match="do not fit"):
        begin(client, 6, 17 * MIB, generation=2)
    with pytest.raises(KeyError, match=r"step 9 .* is not held"):
        client.read(step=9, generation=0, shard="0")
    with begin(client, 7, 5, generation=2) as draft:
        other = make_id(8, generation=2)
        with pytest.raises(ValueError, match="is not what was begun"):
            draft.commit(make_meta(other, b"hello"))
    with pytest.raises(ValueError, match=r"its name takes 300 characters"):
        begin(client, 9, shard="x" * 300)


def test_a_killed_workers_segment_is_free_again_and_nothing_is_visible(
    daemon: Daemon, client: TieredClient
) -> None:
    save(client, make_id(1), make_content(MIB))
    total_bytes = client.status()["total_bytes"]
    worker, shard = Rank(daemon), {"step": 9, "generation": 0, "shard": "0", "num_shards": 1}
    assert worker.ask("save", **shard, num_bytes=MIB, halt=True) == {"halted": True}
    worker.kill()
    wait_for_connections(client, 1)

    assert [each.step for each in client.steps()] == [1]
    with begin(client, 9):
        assert client.status()["total_bytes"] == total_bytes + MIB
    assert load(client, make_id(1)) == make_content(MIB)


@pytest.mark.slow
def test_a_lost_connection_of_a_living_worker_costs_its_segment(
    daemon: Daemon, client: TieredClient
) -> None:
    other = daemon.client()
    stray = begin(other, 1)
    assert other._link is not None
    connection = other._link.frames.socket
    connection.shutdown(socket.SHUT_WR)
    # Blocks until the daemon has given up to wait for the end of this process.
    assert connection.recv(1) == b""

    save(client, make_id(1), make_content(MIB, 1))
    stray.memory[:] = make_content(MIB, 2)

    assert load(client, make_id(1)) == make_content(MIB, 1)
    assert client.status()["total_bytes"] == MIB
    with pytest.raises(LostError):
        stray.commit(make_meta(make_id(1), make_content(MIB, 2)))


def test_a_killed_daemon_keeps_what_was_sealed_and_nothing_else(
    daemon: Daemon, client: TieredClient
) -> None:
    contents = {make_id(step): make_content(MIB + step, step) for step in range(3)}
    for shard_id, content in contents.items():
        save(client, shard_id, content)
    draft = begin(client, 9)
    draft.memory[:] = make_content(MIB, 9)

    daemon.kill()
    daemon.start()

    with pytest.raises(LostError):
        draft.commit(make_meta(make_id(9), make_content(MIB, 9)))
    assert len(segments(daemon.folder)) == 3
    save(client, make_id(10), make_content(MIB, 10))
    draft.memory[:] = make_content(MIB, 11)
    assert [each.step for each in client.steps()] == [10, 2, 1, 0]
    assert {each: load(client, each) for each in contents} == contents
    assert load(client, make_id(10)) == make_content(MIB, 10)


def test_a_client_connects_once_more_after_a_restart_and_then_gives_up(
    daemon: Daemon, client: TieredClient
) -> None:
    save(client, make_id(1), b"hello")
    for _ in range(2):
        daemon.kill()
        daemon.start()
        assert load(client, make_id(1)) == b"hello"
    daemon.kill()

    with pytest.raises(LostError, match="no daemon answers at"):
        client.steps()


def test_what_was_being_read_can_be_let_go_after_a_restart(
    daemon: Daemon, client: TieredClient
) -> None:
    save(client, make_id(1), b"hello")
    with client.read(step=1, generation=0, shard="0") as loan, begin(client, 2):
        daemon.kill()
        daemon.start()
        assert bytes(loan.memory) == b"hello"

    assert load(client, make_id(1)) == b"hello"


def test_a_second_daemon_on_the_folder_is_refused(daemon: Daemon) -> None:
    second = Daemon(folder=daemon.folder)
    second.spawn()

    assert second.wait() == 1
    assert f"{daemon.folder} is in use by the memoryd with pid {daemon.pid}" in (second.outputs[0])
    assert "Traceback" not in second.outputs[0]
    assert daemon.client().status()["pid"] == daemon.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(daemon: Daemon, client: TieredClient, number: int) -> None:
    save(client, make_id(1), make_content(MIB))
    begin(client, 2)

    assert daemon.end(number) == 0

    assert daemon.outputs == [""]
    assert not daemon.socket_path.exists()
    assert [each.name for each in segments(daemon.folder)] == ["segment-0"]
    assert load(daemon.start().client(), make_id(1)) == make_content(MIB)


def test_remove_on_exit_leaves_nothing(tmp_path: Path) -> None:
    options = ["--remove-on-exit"]
    with Daemon(folder=tmp_path / "arena", options=options, is_real=True).start() as daemon:
        save(daemon.client(), make_id(1), b"hello")

        assert daemon.end() == 0

        assert list(tmp_path.iterdir()) == []


def test_an_address_of_the_http_door_that_is_taken_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = Daemon(folder=tmp_path / "arena", options=["--http", address])
        refused.spawn()
        assert refused.wait() == 1
        assert "Address already in use" in refused.outputs[0]
        assert not refused.socket_path.exists()


@pytest.mark.slow
def test_a_silent_worker_loses_its_writing_and_may_begin_again(tmp_path: Path) -> None:
    with Daemon(folder=tmp_path / "arena", options=["--idle-s", "0.2"]).start() as daemon:
        client = daemon.client()
        draft = begin(client, 1)
        assert client._link is not None
        # Blocks until the daemon ends the connection.
        assert client._link.frames.socket.recv(1) == b""

        with pytest.raises(LostError):
            draft.commit(make_meta(make_id(1), make_content(MIB)))
        save(client, make_id(2), b"hello")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder that leaves room for more before it in the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="door-") as folder:
        yield Path(folder)


def test_full_tmpfs_costs_a_save_not_the_daemon(short_path: Path) -> None:
    folder = short_path / "small"
    folder.mkdir()
    script = f'mount -t tmpfs -o size=6m tmpfs {folder} && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*before, "true"], capture_output=True).returncode:
        pytest.skip("no right to mount")
    with (
        ExitStack() as stack,
        Daemon(folder=folder / "a", budget_mib=6, options=KEEP_ALL) as daemon,
    ):
        daemon.spawn(before=before)
        assert daemon.process is not None
        assert daemon.process.stdout is not None
        assert daemon.process.stdout.readline()
        # The mount is seen by the daemon alone.
        path = Path(f"/proc/{daemon.pid}/root") / str(daemon.socket_path).lstrip("/")
        client = stack.enter_context(TieredClient(path, namespace="run", job="job"))

        save(client, make_id(1), make_content(3 * MIB, 1))
        filler = path.with_name("filler")
        filler.write_bytes(bytes(2 * MIB))
        with pytest.raises(VaultFullError, match="No space left on device"):
            begin(client, 2, 2 * MIB)
        assert client.status()["total_bytes"] == 3 * MIB
        filler.unlink()
        save(client, make_id(2), make_content(2 * MIB, 2))
        assert load(client, make_id(1)) == make_content(3 * MIB, 1)
        assert daemon.end() == 0
