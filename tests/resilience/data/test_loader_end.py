"""What is left when a job is over, and what stays while others still read."""

from __future__ import annotations

import os

import numpy as np
import pytest

from resilience.data import producer_connection, spawn
from tests.processes import wait_for_end
from tests.resilience.data.scene import Scene, make_batch


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
    """One that stands still would hold up whoever waits for a batch, and in training all ranks."""
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
