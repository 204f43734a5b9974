"""AWS's own client against the door: alone, and as writer and reader on four ranks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from resilience.tiered.aws_bucket import BucketSource
from resilience.tiered.aws_door import CheckpointSource, DoorSource
from resilience.tiered.aws_reader import AwsReader
from resilience.tiered.stores.s3 import S3Settings
from tests.ports import free_ports
from tests.processes import stopped
from tests.resilience.rank_processes import run_ranks
from tests.resilience.tiered.aws_ranks import LIMIT_S, PYTHON, SAVED, WORLD_SIZE, Workers, loaded
from tests.resilience.tiered.aws_state import State, is_equal, make_state
from tests.resilience.tiered.daemons import Daemon
from tests.resilience.tiered.http_client import (
    MIB,
    Client,
    Doors,
    head,
    shard_meta,
    shard_path,
)
from tests.resilience.tiered.s3_server import ENVIRONMENT, s3_server

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no {PYTHON}; scripts/install-aws-checkpointing.sh makes it"
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    options = ("--http", f"127.0.0.1:{free_ports(1)[0]}")
    with Daemon(folder=tmp_path / "arena", budget_mib=256, options=options) as running:
        yield running.start()


def job_of(daemon: Daemon) -> dict[str, Any]:
    """Return what tells workers of a daemon's door."""
    return {"url": f"http://{daemon.options[1]}", "namespace": "job"}


def connect(daemon: Daemon) -> Client:
    host, port = daemon.options[1].split(":")
    return Client((host, int(port)))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("workers"))
    yield workers
    workers.kill()


def test_every_call_of_the_client(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100_000))
    with Doors(tmp_path / "arena").open(budget_bytes=512 * MIB) as opened:
        host, port = opened.door.address
        done = subprocess.run(
            [PYTHON, "-W", "ignore", HERE / "aws_probe.py", f"http://{host}:{port}", file],
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert opened.vault.metas() == []
    config = {"num_ranks": 3, "steps_to_retain_per_rank": 3}
    whole = [10_240_000, True]

    assert json.loads(done.stdout) == {
        "config of none": {}, "put without namespace": "InMemoryResourceNotFoundError",
        "latest of none": [], "made": config, "again": config, "config": config,
        "latest of nothing": [], "missing shard": None, "bad name": "InMemoryNameSpaceCreateError",
        "put 0": None, "put 1": None, "latest without metadata": [], "put metadata": None,
        "latest": [7], "get": whole, "get of another rank": whole, "get metadata": 4,
        "put file": None, "get file": [100_000, False], "put nothing": None,
        "get nothing": [0, False], "kept": [5, 4, 3], "kept, two": [5, 4], "dropped": None,
        "delete": None, "deleted": None, "latest after delete": [4, 3], "delete namespace": None,
        "config of deleted": {}, "reset": None, "after reset": {},
    }  # fmt: skip


@pytest.mark.slow
def test_all_workers_and_the_daemon_may_die(workers: Workers, daemon: Daemon) -> None:
    job = job_of(daemon)
    assert workers.save(**job, step=0, seed=1) == SAVED
    assert workers.save(**job, step=10, seed=2, is_async=True) == SAVED
    workers.kill()
    assert workers.load(**job, seed=2) == loaded(10)
    assert workers.load(**job, seed=1, step=0) == loaded(0)

    daemon.kill()
    assert all("error" in each for each in workers.load(**job, seed=2))
    daemon.start()
    assert workers.load(**job, seed=2) == loaded(10)
    assert workers.save(**job, step=20, seed=3) == SAVED
    assert workers.load(**job, seed=3) == loaded(20)


@pytest.mark.slow
def test_daemon_that_is_too_slow_fails_the_save_alone(workers: Workers, daemon: Daemon) -> None:
    job = job_of(daemon)
    assert workers.save(**job, step=1, seed=1) == SAVED
    with stopped(daemon.pid):
        assert all("error" in each for each in workers.save(**job, step=2, seed=2, timeout_s=0.5))
        workers.tell(do="save", **job, step=3, seed=3)

    assert workers.replies() == SAVED
    assert workers.load(**job, seed=3) == loaded(3)
    assert workers.load(**job, seed=1, step=1) == loaded(1)


def load_ours(rank: int, world_size: int, folder: str, url: str, endpoint: str = "") -> bool:
    """Load all that the four ranks of AWS's environment saved, with another number of ranks."""
    store = dist.FileStore(f"{folder}/store-{world_size}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    def whole(seed: int) -> State:
        return {k: v for each in range(WORLD_SIZE) for k, v in make_state(each, seed).items()}

    state = whole(0)
    sources: list[CheckpointSource] = [DoorSource(url, "job")]
    if endpoint:
        os.environ.update(ENVIRONMENT)  # the server of these processes was forked before
        settings = S3Settings(bucket="bucket", prefix="base", endpoint=endpoint)
        sources.append(BucketSource(settings, "job"))
    reader = AwsReader(sources)
    dcp.load(state, storage_reader=reader)
    return reader.step == 8 and is_equal(whole(5), state)


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.slow),
        8,
    ],
)
def test_ours_reads_on_any_number_of_ranks(
    workers: Workers, daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    job = job_of(daemon)
    assert workers.save(**job, step=8, seed=5) == SAVED

    found = run_ranks(load_ours, world_size, str(tmp_path), job["url"])
    assert found == [True] * world_size


@pytest.mark.slow
def test_ours_reads_from_s3_what_no_memory_has(
    workers: Workers, daemon: Daemon, tmp_path: Path
) -> None:
    with s3_server(tmp_path) as server:
        server.make_bucket("bucket")
        workers.kill()  # the next ones have the server's credentials
        job = {**job_of(daemon), "s3": "s3://bucket/base"}
        assert workers.save(**job, step=8, seed=5, endpoint=server.endpoint) == SAVED
        daemon.kill()

        found = run_ranks(load_ours, 2, str(tmp_path), job["url"], server.endpoint)
        workers.kill()
    assert found == [True] * 2


def test_503_is_got_over_by_clients_that_try_again(workers: Workers, tmp_path: Path) -> None:
    asked: list[int] = []

    def ask_room(num_bytes: int) -> bool:
        asked.append(num_bytes)
        if len(asked) > WORLD_SIZE:
            holder.close()
        return True

    doors = Doors(tmp_path / "arena")
    with doors.open(budget_bytes=32 * MIB, ask_room=ask_room) as opened:
        host, port = opened.door.address
        job = {"url": f"http://{host}:{port}", "namespace": "job"}
        with opened.client() as holder, opened.client() as client:
            client.create("job", WORLD_SIZE + 1)
            client.create("other", 1)
            # Started before: the door does not wait long for the body that holds all memory.
            workers.load(**job, seed=1)
            holder.send(head("POST", shard_path("other", 0, 1), Content_Length=str(32 * MIB),
                             Shard_Meta=shard_meta(b""), Expect="100-continue"))  # fmt: skip
            assert holder.answer().status == 100
            assert all("error" in each for each in workers.save(**job, step=1, seed=1))
            assert len(asked) == WORLD_SIZE

            assert workers.save(**job, step=1, seed=1, retries=8) == SAVED
        assert workers.load(**job, seed=1) == loaded(1)
