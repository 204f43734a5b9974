"""When a save of the trainer becomes visible."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from recipes_training.backends.tiered import TieredCheckpoints
from resilience.errors import BrokenError, CorruptionError
from resilience.events import EventLog, read_events
from resilience.tiered.client import TieredClient
from resilience.tiered.loader import whole_steps
from tests.recipes_training.backends.subjects import NoProgress, go_on, make_subject
from tests.recipes_training.jobs import make_job
from tests.resilience.state.nodes import PlainView
from tests.resilience.tiered.daemons import Daemon
from tests.resilience.tiered.kept import stored, wait_until
from tests.scenarios.tiered.runs import folder_store, tiered


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TieredClient]:
    with Daemon(folder=tmp_path / "arena").start() as daemon:
        yield daemon.client()


@pytest.fixture
def saves(tmp_path: Path, client: TieredClient) -> TieredCheckpoints:
    saves = make_saves(tmp_path, client)
    bind(saves)
    return saves


def make_saves(
    folder: Path, client: TieredClient, store: Any = None, **changes: int
) -> TieredCheckpoints:
    """Return them, with `changes` of the settings of memory."""
    job = make_job(resilience={"tiered": tiered(every_n_steps=4, store=store)})
    settings = job.resilience.tiered
    assert settings is not None
    return TieredCheckpoints(
        client,
        job,
        settings.model_copy(update={"ram": settings.ram.model_copy(update=changes)}),
        EventLog(folder / "events.jsonl", node="n0", rank=0, generation=0),
        run_dir=folder,
    )


def bind(saves: TieredCheckpoints, check: Any = go_on, num_values: int = 9) -> None:
    """Let them save a state of which `check` says whether it is right."""
    view = PlainView([torch.ones(num_values)], {"view": {}, "recovery": {}})
    saves.bind(make_subject(view, NoProgress(check=check)))


def fail() -> None:
    raise CorruptionError("a bit has changed")


def test_save_is_visible_when_it_is_kept(saves: TieredCheckpoints, client: TieredClient) -> None:
    saves.begin_step(4, is_requested=False)
    saves.before_update()
    before = whole_steps(client)
    saves.keep()
    saves.abandon()

    assert before == []
    wait_until(lambda: [each.step for each in whole_steps(client)] == [4])
    saves.finish(5)
    assert whole_steps(client)[0].step == 5


def test_too_few_failure_domains_are_told_before_the_first_save(
    tmp_path: Path, client: TieredClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """And once: here are two nodes on one machine, which is what fails together."""
    saves = make_saves(tmp_path, client, domains_min=2)
    bind(saves)

    def told() -> list[object]:
        return [(each.fields.get("num"), each.fields.get("wanted"))
                for each in read_events(tmp_path / "events.jsonl")
                if each.event == "failure_domains"]  # fmt: skip

    assert saves.load_newest() is None
    assert told() == [(1, 2)]
    assert "checkpoints in memory are in 1 of 2 failure domains" in capsys.readouterr().err
    saves.finish(4)
    assert told() == [(1, 2)]
    client.num_domains = 2  # as of another pod that has come
    saves._tell_domains()
    assert told() == [(1, 2), (2, 2)]
    assert not capsys.readouterr().err


def test_name_that_the_daemon_cannot_resolve_is_an_event_once(
    tmp_path: Path, client: TieredClient
) -> None:
    saves = make_saves(tmp_path, client)
    bind(saves)
    assert client.steps() == []
    assert client.nameless == [], "of a daemon without others"

    client.nameless = ["a-1.a:29501"]  # as of a pod without an address
    for _ in range(2):
        saves._tell_domains()

    texts = [
        each.fields["text"]
        for each in read_events(tmp_path / "events.jsonl")
        if each.event == "warning"
    ]
    assert texts == ["memoryd cannot reach a-1.a:29501: its name does not resolve"]


def test_run_that_begins_has_the_memory_of_its_saves_made(
    saves: TieredCheckpoints, client: TieredClient
) -> None:
    before = client.made_bytes()
    saves.begin_run(0)
    wait_until(lambda: client.made_bytes() - before == 2 * mmap.PAGESIZE)

    saves.finish(5)

    assert client.status()["total_bytes"] == 2 * mmap.PAGESIZE


def test_last_save_is_visible_only_if_its_state_is_right(
    saves: TieredCheckpoints, client: TieredClient
) -> None:
    bind(saves, fail)
    with pytest.raises(CorruptionError):
        saves.finish(4)
    saves.abandon()
    before = whole_steps(client)
    bind(saves)

    saves.finish(4)

    assert before == []
    assert [each.step for each in whole_steps(client)] == [4]


def test_part_that_a_worker_saves_alone_is_visible(
    saves: TieredCheckpoints, client: TieredClient
) -> None:
    saves.abandon()

    assert saves.save_part(5, go_on)
    # The same shard of the same history is the same, whoever saves it.
    assert saves.save_part(5, go_on)

    assert [each.step for each in whole_steps(client)] == [5]


@pytest.mark.parametrize("is_alone", [False, True])
def test_last_state_waits_for_a_daemon_that_is_started_again(
    tmp_path: Path, is_alone: bool
) -> None:
    with Daemon(folder=tmp_path / "arena").start() as daemon:
        client = daemon.client()
        saves = make_saves(tmp_path, client)
        bind(saves)
        saves.begin_run(0)
        daemon.kill()
        again = Thread(target=daemon.start)
        again.start()

        if is_alone:
            saves.save_part(5, go_on)
        else:
            saves.finish(5)

        again.join()
        assert [each.step for each in whole_steps(client)] == [5]


def test_part_is_given_up_where_something_else_is_to_be_done(
    saves: TieredCheckpoints, client: TieredClient
) -> None:
    def stop() -> None:
        raise BrokenError("the agent wants something else")

    with pytest.raises(BrokenError):
        saves.save_part(5, stop)

    assert whole_steps(client) == []


@pytest.mark.parametrize(
    ("num_values", "is_required", "stored_steps", "is_unstored"),
    [
        pytest.param(9, True, {"000000000007-g0"}, False, id="saved"),
        # Its daemon would wait for it in vain.
        pytest.param(1 << 20, True, set(), True, id="no-room"),
        pytest.param(1 << 20, False, set(), False, id="no-room, not required"),
    ],
)
def test_a_run_that_is_asked_to_stop_leaves_its_last_step_in_the_store(
    tmp_path: Path, num_values: int, is_required: bool, stored_steps: set[str], is_unstored: bool
) -> None:
    """By its cadence the store would not get that step."""
    disk = tmp_path / "disk"
    store = folder_store(disk, every_n_steps=100, required=is_required)
    words = ("--store", f"folder:{disk}", "--store-every-n-steps", "100")
    with Daemon(folder=tmp_path / "arena", budget_mib=1, options=words).start() as daemon:
        saves = make_saves(tmp_path, daemon.client(), store)
        bind(saves, num_values=num_values)
        saves.finish(7)

        assert saves.is_unstored == is_unstored
        assert daemon.end() == 0

    kept = [each for space in disk.iterdir() for each in stored(disk, "steps", space.name)]
    assert {each.parent.name for each in kept} == stored_steps
