"""What a worker reads: the right batches, from a cache that others share and that survives."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resilience.data import cached, producer_connection, spawn
from resilience.data.errors import (
    DataCacheError,
    LateBatchError,
    ProducerError,
)
from resilience.events import EventLog, read_events
from tests.processes import stopped, wait_for_end
from tests.resilience.data.scene import (
    LIMIT_S,
    Scene,
    end_process,
    hold_at,
    make_batch,
    make_settings,
    run_script,
)
from tests.resilience.data.watch import check, read

READ = """
import sys
from pathlib import Path
from tests.resilience.data.scene import Scene, make_batch
scene = Scene(Path(sys.argv[1]))
with scene.open(lookback_length=100) as loader:
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        assert (loader.read(number)["x"] == make_batch(number)).all()
print("read", flush=True)
"""


def test_batches_come_in_order_and_by_number(scene: Scene) -> None:
    loader = scene.open()

    for number, batch in zip(range(30), loader, strict=False):
        check(batch, number)
    read(loader, 29, 28, 40)
    check(next(iter(loader)), 41)
    assert loader.samples_consumed == 42


def test_a_resume_begins_at_its_sample_and_opens_the_source_there(scene: Scene) -> None:
    loader = scene.open(samples_per_batch=6, samples_consumed=600_000)

    check(next(iter(loader)), 100_000)
    assert min(scene.lines("make")) == 100_000
    loader.load_state_dict({"samples_consumed": 600, "source_state": None})
    check(next(iter(loader)), 100)
    assert loader.state_dict() == {"samples_consumed": 606, "source_state": None}
    with pytest.raises(ValueError, match="7 samples consumed are no whole number of batches of 6"):
        loader.load_state_dict({"samples_consumed": 7})
    with pytest.raises(ValueError, match="resume where a batch of all positions begins"):
        scene.open(samples_per_batch=6, samples_consumed=7)


def test_a_changed_recipe_never_gets_an_old_batch(scene: Scene) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"identity": {}}, {"options": {"num_items": 9}}, {"samples_per_batch": 2},
        {"stage": "val"},
    ]  # fmt: skip

    fingerprints = {scene.open(**each)._spec.fingerprint for each in changes}

    assert len(fingerprints) == len(changes)


def test_what_is_cached_is_there_without_a_producer(scene: Scene, gate: Path) -> None:
    """The new producer never makes anything: its source waits for ever before batch 20."""
    options = {"number": 20, "gate": str(gate)}
    first = scene.open(hold_at, options, prefetch_length=30)
    read(first, *range(20))
    for pid in scene.producers():
        end_process(pid, signal.SIGKILL)

    again = scene.open(hold_at, options, prefetch_length=30, samples_consumed=18)

    read(again, 18, 19)
    assert len(scene.producers()) == 1


def test_consumers_in_other_processes_share_one_producer(scene: Scene) -> None:
    loader = scene.open(lookback_length=100)
    read(loader, 0)
    others = [run_script(READ, str(scene.log.parent), "0", "40") for _ in range(3)]

    read(loader, *range(40))

    for other in others:
        assert other.communicate(timeout=LIMIT_S)[0] == "read\n"
    assert len(scene.producers()) == 1
    assert sorted(set(scene.lines("make"))) == sorted(scene.lines("make"))


def test_validation_begins_at_0_each_time_and_is_warm(scene: Scene) -> None:
    loader = scene.open(stage="val", options={"num_batches": 12})

    assert [batch["number"] for batch in loader] == list(range(12))
    read(scene.open(stage="val", options={"num_batches": 12}), *range(4))
    assert [batch["number"] for batch in loader] == list(range(12))
    made = scene.lines("make")
    assert [made.count(number) for number in range(4)] == [1] * 4


def test_a_late_batch_is_an_error_that_says_what_the_producer_does(
    scene: Scene, gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before its deadline it is told of, once, with the same words."""
    monkeypatch.setattr(producer_connection, "LATE_S", 0.1)
    monkeypatch.setattr(producer_connection, "_EXPLAIN_S", LIMIT_S)
    options = {"number": 3, "gate": str(gate)}
    read(scene.open(hold_at, options), 0, 1, 2)
    events = EventLog(tmp_path / "events", node="n0", rank=2, generation=0)
    loader = scene.open(hold_at, options, deadline_s=2, events=events)

    with pytest.raises(
        LateBatchError,
        match=r"batch 3 has not come within 2 s: the producer waits for the source's batch 3; "
        "if the data are that slow, raise resilience.mmap.deadline_s",
    ):
        loader.read(3)
    assert late_batches(tmp_path / "events") == [
        (3, "batch 3 of position 0 has not come yet: the producer waits for the source's batch 3")
    ]
    gate.write_bytes(b"go on")
    events.close()
    read(scene.open(hold_at, options), 3, 4)


def late_batches(path: Path) -> list[tuple[int | None, str]]:
    found = [event for event in read_events(path) if event.event == "batch_late"]
    return [(event.step, event.fields["text"]) for event in found]


def test_a_producer_that_is_stopped_is_an_error_within_the_deadline(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before that it is told of, once."""
    for name in ("LATE_S", "_EXPLAIN_S"):
        monkeypatch.setattr(producer_connection, name, 0.1)
    read(scene.open(), 0)
    events = EventLog(tmp_path / "events", node="n0", rank=2, generation=0)
    loader = scene.open(deadline_s=3, events=events)
    (pid,) = scene.producers()

    with (
        stopped(pid),
        pytest.raises(LateBatchError, match="the producer does not answer"),
    ):
        loader.read(1_000)
    told = late_batches(tmp_path / "events")
    assert told == [
        (1_000, "batch 1000 of position 0 has not come yet: the producer does not answer")
    ]
    monkeypatch.setattr(producer_connection, "LATE_S", LIMIT_S)
    read(loader, 2_000)
    read(scene.open(), 1_000)
    read(loader, 1_000)
    # It says now what it does, which nobody asks any more.
    assert late_batches(tmp_path / "events") == told
    events.close()


def test_who_waits_is_asked_now_and_then_and_may_end_the_wait(scene: Scene, gate: Path) -> None:
    num_calls = 0

    def on_wait() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise InterruptedError("somebody else has failed")

    options = {"number": 3, "gate": str(gate)}
    loader = scene.open(hold_at, options, on_wait=on_wait)

    with pytest.raises(InterruptedError, match="somebody else"):
        read(loader, 0, 1, 2, 3)
    gate.write_bytes(b"go on")
    read(loader, loader.samples_consumed, 3, 4)


def test_a_producer_that_cannot_be_started_costs_no_batch_that_is_there(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = scene.open(lookback_length=100)
    read(loader, *range(8))
    end_process(scene.producers()[0], signal.SIGKILL)

    def fail(_spec: object) -> bool:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(producer_connection, "start_producer", fail)
    read(loader, *range(8))
    read(scene.open(lookback_length=100), *range(8))
    with pytest.raises(ProducerError, match="cannot start a producer of batches: Resource temp"):
        loader.read(500)
    assert loader.samples_consumed == 8
    monkeypatch.undo()
    read(loader, *range(8, 20))


def test_counting_what_is_ready_spoils_nothing(scene: Scene) -> None:
    """The segment that was read last may have gone since."""
    loader = scene.open()
    read(loader, 0)
    for path in scene.segments():
        path.unlink()

    assert loader.count_ready() == 0
    read(loader, 1, 2)


def test_whether_a_batch_is_ready_is_said_without_a_wait(scene: Scene, gate: Path) -> None:
    loader = scene.open(hold_at, options={"number": 40, "gate": str(gate)})

    assert not loader.is_ready(40)
    # Far ahead of what the producer makes for who is at the first one: it has heard of that.
    with gate.open("wb"):
        pass
    read(loader, 40)
    assert loader.is_ready(40)


def test_a_closed_loader_stays_closed(scene: Scene) -> None:
    loader = scene.open(stage="val")
    read(loader, 0)
    loader.close(is_over=True)

    uses: list[Callable[[], Any]] = [
        lambda: next(iter(loader)),
        lambda: loader.read(0),
        loader.explain,
        lambda: loader.load_state_dict({"samples_consumed": 3}),
    ]
    for use in uses:
        with pytest.raises(DataCacheError, match="the loader is closed"):
            use()
    assert len(scene.producers()) == 1
    assert not scene.root.exists()


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        pytest.param("train", set(range(30, 34)), id="train"),
        pytest.param("val", {*range(4), *range(29, 36)}, id="val"),
    ],
)
def test_training_and_validation_have_lengths_of_their_own(
    scene: Scene, stage: str, expected: set[int]
) -> None:
    loader = scene.open(
        options={"num_items": (1 << 17) + 1},  # so many that a segment holds one batch
        stage=stage,
        prefetch_length=2,
        val_prefetch_length=4,
        lookback_length=1,
        val_lookback_length=2,
    )
    for number in range(20, 31):
        loader.read(number)
    loader.load_state_dict({"samples_consumed": 31})

    def held() -> set[int]:
        loader._store.refresh()
        return {number for number in range(60) if loader._store.find(number)}

    end_s = time.monotonic() + LIMIT_S
    while (found := held()) != expected:
        # Returns when the producer has answered.
        assert time.monotonic() < end_s, (found, loader.explain())
        loader.explain()


def test_nothing_is_left_of_a_job_when_its_last_loader_says_that_it_is_over(scene: Scene) -> None:
    loaders = [scene.open(rank=rank, size=2) for rank in range(2)] + [scene.open(stage="val")]
    for loader in loaders:
        loader.read(0)
    producers = scene.producers()
    for loader in loaders[:-1]:
        loader.close(is_over=True)
    assert scene.root.exists()

    loaders[-1].close(is_over=True)

    assert list(scene.root.parent.iterdir()) == []
    assert len(producers) == 3
    for each in producers:
        wait_for_end(each)


def test_who_ends_first_waits_for_nothing_and_ends_it_for_nobody_else(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = scene.open(), scene.open()
    for loader in (first, second):
        loader.read(0)

    def wait(*_: object) -> None:
        raise AssertionError("waits for a producer's end")

    with monkeypatch.context() as patch:
        for module in (producer_connection, spawn):
            patch.setattr(module, "await_end", wait)
        first.close(is_over=True)

    assert np.array_equal(second.read(500)["x"], make_batch(500))
    assert len(scene.producers()) == 1
    second.close(is_over=True)
    assert not scene.root.exists()


def test_who_opens_a_cache_leaves_the_end_of_old_producers_to_its_own(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stands still would hold up every rank that waits for a batch."""
    old = scene.open(size=2, owner_pid=os.getpid())
    old.read(0)
    old.close()

    with monkeypatch.context() as patch:
        patch.setattr(producer_connection, "start_producer", lambda _spec: False)
        new = scene.open(owner_pid=os.getpid())
    assert list(scene.root.glob("train-0of2-*"))
    new.read(0)
    assert not list(scene.root.glob("train-0of2-*"))


@pytest.mark.parametrize("is_used", [False, True])
def test_another_number_of_positions_ends_the_producers_of_the_old_ones(
    scene: Scene, is_used: bool
) -> None:
    """Though their owner lives; those with a consumer go with it."""
    old = []
    for rank in range(2):  # one after the other, so that the producers are in their order
        old.append(scene.open(rank=rank, size=2, owner_pid=os.getpid()))
        old[rank].read(0)
    producers = scene.producers()
    for loader in old[is_used:]:
        loader.close()

    new = scene.open(owner_pid=os.getpid())
    new.read(0)

    for each in producers[is_used:]:
        wait_for_end(each)
    names = sorted(path.name.rpartition("-")[0] for path in scene.root.glob("train-*"))
    assert names == ["train-0of1", "train-0of2"][: 1 + is_used]
    old[0].close()
    wait_for_end(producers[0])
    new.close(is_over=True)
    assert list(scene.root.parent.iterdir()) == []
    for each in scene.producers():
        wait_for_end(each)


def test_changed_code_begins_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would train on batches of code that is no more there."""
    module = tmp_path / "changing_source.py"
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for number in (1, 2, 2):
        module.write_text(f"import functools as f\n@f.cache\ndef make():\n    return [{number}]\n")
        sys.modules.pop("changing_source", None)
        factory = partial(importlib.import_module("changing_source").make)
        with cached(factory, make_settings(tmp_path), identity={}, job="run") as loader:
            found.append(loader._spec.fingerprint)

    assert found[0] != found[1] == found[2]
