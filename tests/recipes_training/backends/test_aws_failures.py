"""AWS's library where S3 or the daemon fails it, on one worker or for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from recipes_training.backends import aws
from recipes_training.backends.aws import AwsCheckpoints
from recipes_training.backends.aws_library import Library, find_steps
from recipes_training.errors import CheckpointError
from recipes_training.group import WorkerGroup
from resilience.events import Event, EventLog, read_events
from tests.recipes_training.backends.subjects import make_subject
from tests.recipes_training.groups import make_group
from tests.scenarios.tiered.test_aws import aws_job

URL = "s3://bucket/base"


def _done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


@dataclass
class World:
    """Two workers as threads, and what stands in for the library and for DCP."""

    folder: Path
    store: Any = field(default_factory=dist.HashStore)
    fails: Callable[[int, Any, int | None], bool] = lambda rank, config, step: False
    """Whether the library cannot make a writer or reader."""
    loads: Callable[[int], bool] = lambda step: True
    steps: list[int] | Exception = field(default_factory=list)
    rank: threading.local = field(default_factory=threading.local)
    configs: list[tuple[int | None, Any]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    """Rank and step of each that was begun."""
    future: Callable[[], Future[Any]] = _done

    def make(self, config: Any, step: int | None) -> Any:
        self.configs.append((step, config))
        if self.fails(self.rank.number, config, step):
            raise LookupError("no word of the bucket")
        return SimpleNamespace(step=step)

    def save(self, content: Any, *, storage_writer: Any, process_group: Any) -> Future[Any]:
        self.saves.append((self.rank.number, storage_writer.step))
        return self.future()

    def load(
        self, content: Any, *, storage_reader: Any, process_group: Any, **options: Any
    ) -> None:
        if not self.loads(storage_reader.step):
            raise LookupError(f"step {storage_reader.step} is torn")

    def find(self, reader: Any) -> list[int]:
        if isinstance(self.steps, Exception):
            raise self.steps
        return self.steps

    def run(self, act: Callable[[AwsCheckpoints, WorkerGroup], Any]) -> Any:
        """Return what both workers' acts return, or the error of the first that fails."""
        job = aws_job(100, store=URL, store_every=8)

        def work(rank: int) -> Any:
            self.rank.number = rank
            group = self._group(rank)
            with EventLog(
                self.folder / "events.jsonl", node="n0", rank=rank, generation=0
            ) as events:
                assert job.resilience.tiered is not None
                saves = AwsCheckpoints(
                    job, job.resilience.tiered, run_dir=self.folder, events=events
                )
                lineage = saves._lineage
                rest = {"recovery": {"lineage": lineage}}
                view: Any = SimpleNamespace(
                    replica=0,
                    shard="",
                    tensors=list,
                    read_rest=lambda: rest,
                    write_rest=lambda rest: None,
                )
                state: Any = SimpleNamespace(entries=dict)
                saves.bind(make_subject(view, group=group, state=state, stall_s=0.0))
                return act(saves, group)

        with ThreadPoolExecutor(2) as pool:
            return [each.result(30) for each in [pool.submit(work, rank) for rank in range(2)]]

    def _group(self, rank: int) -> WorkerGroup:
        return make_group(rank, store=self.store, node="n0", num_local_ranks=2)

    def named(self, name: str) -> list[Event]:
        events = read_events(self.folder / "events.jsonl")
        return [each for each in events if each.event == name]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    library = Library(
        writer=made.make,
        reader=made.make,
        config=SimpleNamespace,
    )
    monkeypatch.setattr(aws, "open_library", lambda: library)
    monkeypatch.setattr(aws, "async_save", made.save)
    monkeypatch.setattr(aws, "load", made.load)
    monkeypatch.setattr(aws, "find_steps", made.find)
    monkeypatch.setattr(aws, "FIND_TIMEOUT_S", 0.0)
    monkeypatch.setattr(aws.dist, "new_group", lambda **options: None)
    return made


def take_steps(saves: AwsCheckpoints, *steps: int) -> None:
    for step in steps:
        saves.begin_step(step, is_requested=False)
        saves.before_update()
        saves.keep()


def test_worker_without_writer_costs_all_that_checkpoint_alone(world: World) -> None:
    world.fails = lambda rank, config, step: rank == 1 and step == 4

    world.run(lambda saves, group: take_steps(saves, 4, 5, 8, 9))

    assert sorted(world.saves) == [(0, 8), (1, 8)]
    failed = world.named("checkpoint_failed")
    assert {(each.rank, each.step) for each in failed} == {(0, 4), (1, 4)}
    assert {each.fields["reason"] for each in failed} == {"no word of the bucket"}
    assert [each.step for each in world.named("checkpoint_saved")] == [8]


def test_s3_is_asked_for_nothing_by_saves_that_do_not_go_there(world: World) -> None:
    world.run(lambda saves, group: take_steps(saves, 4, 8))

    found = {(step, each.s3_tier_base_path, each.save_to_s3) for step, each in world.configs}
    assert found == {(4, "", False), (8, URL, True)}


def test_last_step_goes_to_memory_and_then_to_s3_whatever_the_cadence(world: World) -> None:
    def act(saves: AwsCheckpoints, group: WorkerGroup) -> None:
        take_steps(saves, 8)
        saves.finish(9)

    world.run(act)

    found = dict.fromkeys((step, each.save_to_s3) for step, each in world.configs)
    assert list(found) == [(8, True), (9, False), (9, True)]
    assert sorted(world.saves) == [(rank, step) for rank in (0, 1) for step in (8, 9, 9)]
    assert [each.step for each in world.named("checkpoint_saved")] == [8, 9]


def test_last_step_is_in_memory_where_s3_does_not_take_it(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.fails = lambda rank, config, step: rank == 1 and config.save_to_s3

    def act(saves: AwsCheckpoints, group: WorkerGroup) -> bool:
        saves.finish(9)
        return saves.has_saved(9)

    assert world.run(act) == [True, True]

    assert sorted(world.saves) == [(0, 9), (1, 9)]
    assert [each.step for each in world.named("checkpoint_saved")] == [9]
    assert not world.named("checkpoint_failed")
    text = "step 9 is in memory, and S3 has not got it: no word of the bucket"
    assert [each.fields["text"] for each in world.named("warning")] == [text]
    assert capfd.readouterr().err.count(f"recipes_training: {text}") == 1


def test_last_step_is_in_s3_where_memory_does_not_take_it(world: World) -> None:
    world.fails = lambda rank, config, step: rank == 1 and not config.save_to_s3

    world.run(lambda saves, group: saves.finish(9))

    assert sorted(world.saves) == [(0, 9), (1, 9)]
    assert [each.step for each in world.named("checkpoint_saved")] == [9]


def test_save_under_way_costs_the_next_one(world: World) -> None:
    world.future = Future

    world.run(lambda saves, group: take_steps(saves, 4, 8))

    assert sorted(world.saves) == [(0, 4), (1, 4)]
    failed = world.named("checkpoint_failed")
    assert {(each.rank, each.step) for each in failed} == {(0, 8), (1, 8)}
    assert not world.named("warning")


def test_save_that_never_ends_switches_saving_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "SAVE_TIMEOUT_S", 0.0)
    world.future = lambda: Future() if world.rank.number == 1 else _done()

    world.run(lambda saves, group: take_steps(saves, 4, 8, 12))

    assert sorted(world.saves) == [(0, 4), (1, 4)]
    (warning,) = world.named("warning")
    assert warning.step == 8
    assert "has not ended its save of step 4 within 0 s" in warning.fields["text"]
    assert {each.step for each in world.named("checkpoint_failed")} == {8}


def test_save_that_one_worker_cannot_begin_switches_saving_off(world: World) -> None:
    def begin() -> Future[Any]:
        if world.rank.number == 1:
            raise MemoryError
        return Future()

    world.future = begin

    world.run(lambda saves, group: take_steps(saves, 4, 8))

    assert sorted(world.saves) == [(0, 4), (1, 4)]
    assert [each.step for each in world.named("warning")] == [4]


def test_abandoned_save_is_told(world: World) -> None:
    world.future = Future

    def act(saves: AwsCheckpoints, group: WorkerGroup) -> None:
        take_steps(saves, 4)
        saves.abandon()

    world.run(act)

    failed = world.named("checkpoint_failed")
    assert {(each.rank, each.step) for each in failed} == {(0, 4), (1, 4)}


def test_run_does_not_begin_anew_where_tiers_fail(world: World) -> None:
    """One that has another state goes on from that."""
    world.steps = ConnectionError("the daemon is gone")

    def act(saves: AwsCheckpoints, group: WorkerGroup) -> None:
        with pytest.raises(CheckpointError, match=r"cannot tell .* there are: the daemon is gone"):
            saves.load_newest(newer_than=None)
        assert saves.load_newest(newer_than=5) is None

    world.run(act)


@pytest.mark.parametrize(
    ("loads", "fails"),
    [
        (lambda step: step != 12, lambda rank, config, step: False),
        (lambda step: True, lambda rank, config, step: rank == 1 and step == 12),
    ],
    ids=["torn", "no reader"],
)
def test_older_step_is_loaded_where_the_newest_cannot_be(
    world: World, loads: Any, fails: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    world.steps, world.loads, world.fails = [12, 8, 4], loads, fails

    begun = world.run(lambda saves, group: saves.load_newest(newer_than=None))

    assert [each.step for each in begun] == [8, 8]
    assert {each.step for each in world.named("checkpoint_unreadable")} == {12}
    (warning,) = world.named("warning")
    text = "the run goes on from step 8: step 12 cannot be loaded: "
    assert warning.fields["text"].startswith(text)
    assert capfd.readouterr().err.count(f"recipes_training: {text}") == 1
    assert {each.step for each in world.named("checkpoint_loaded")} == {8}


def test_run_does_not_begin_anew_where_no_step_loads(world: World) -> None:
    world.steps, world.loads = [12, 8], lambda step: False

    def act(saves: AwsCheckpoints, group: WorkerGroup) -> None:
        with pytest.raises(CheckpointError, match="there are 12, 8: step 12: step 12 is torn"):
            saves.load_newest(newer_than=None)

    world.run(act)


def test_run_begins_where_there_is_nothing(world: World) -> None:
    assert world.run(lambda saves, group: saves.load_newest(newer_than=None)) == [None] * 2


# ---- looking for steps


@contextmanager
def door(status: int, body: bytes = b"") -> Iterator[str]:
    """Answer each request alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def reader(url: str) -> Any:
    """Return what a reader of the library shows."""
    pytest.importorskip("requests")
    client = SimpleNamespace(
        LATEST_CHECKPOINTS_PATH="/v1/cp/checkpoints/{namespace}/latest",
        namespace="run",
        config=SimpleNamespace(base_url=url, request_timeout=10.0),
    )
    return SimpleNamespace(client=client, s3_strategy=None)


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


def test_steps_of_the_daemon_are_found_newest_first() -> None:
    """There are none in a namespace that it does not know."""
    with door(200, b'[4, "12", 8]') as url:
        assert find_steps(reader(url)) == [12, 8, 4]
    with door(404) as url:
        assert find_steps(reader(url)) == []


@pytest.mark.parametrize(
    ("status", "body"), [(503, b""), (500, b"[]"), (403, b""), (200, b"<html>")]
)
def test_daemon_that_fails_is_not_one_without_steps(status: int, body: bytes) -> None:
    with door(status, body) as url, pytest.raises((OSError, ValueError)):
        find_steps(reader(url))
    with pytest.raises(OSError, match="onnection"):
        find_steps(reader(url))
