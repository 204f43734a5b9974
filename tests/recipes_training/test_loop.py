"""What the loop keeps of a generation that is over, and what it says of the last one."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recipes_training.loop import Loop
from recipes_training.steps.watch import RunWatch
from tests.recipes_training.groups import make_group
from tests.recipes_training.jobs import make_job


class Members:
    """A generation that goes on."""

    def check(self) -> None:
        """Find nothing wrong."""

    def mark(self, activity: Any, step: int, micro_batch: int = 0) -> None:
        """Show nobody."""


def test_check_of_a_group_keeps_no_generation_alive() -> None:
    """Groups and checkpoints keep the check, and a generation has process groups to let go of."""
    watch = RunWatch(lambda: 0, seed=1)
    members: Any = Members()
    watch.enter(members, None, first_micro_batch=0)
    check, known = watch.check, weakref.ref(members)

    watch.leave()
    del members
    gc.collect()

    check()
    assert known() is None


BEFORE = "the newest that was before is that of step 3 in /run/before"


class Saves:
    """Checkpoints of a rank that has seen its part of the last one saved, or has not."""

    place = "/run/state"

    def __init__(self, *, is_saved: bool) -> None:
        self.has_saved = lambda step: is_saved
        self.finish = lambda step: None


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ((True, True), "the state of step 5 is saved in /run/state"),
        ((True, False), f"the state of step 5 could not be saved; {BEFORE}"),
    ],
)
def test_last_state_is_named_only_where_every_rank_has_seen_its_part_saved(
    seen: tuple[bool, ...], words: str
) -> None:
    store = HashStore()

    def save(rank: int) -> str:
        loop: Any = Loop.__new__(Loop)
        loop.progress = SimpleNamespace(step=5)
        loop.watch = SimpleNamespace(begin=lambda step, activity: None)
        loop._saves = Saves(is_saved=seen[rank])
        loop._complete, loop._place = 3, "/run/before"
        return str(loop._save_last(make_group(rank, store=store), has_state=True))

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(save, range(2))) == [words] * 2


def test_a_generation_begins_without_what_an_aborted_step_has_left() -> None:
    loop: Any = Mock(_job=make_job(), _make_group=lambda _: make_group(), progress=Mock(step=5))

    Loop.run(loop, Mock(is_last=True))

    assert loop._trainer.mock_calls == [call.discard(), call.settle()]
