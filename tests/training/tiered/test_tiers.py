"""When a save of the trainer becomes visible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from resilience.errors import CorruptionError
from resilience.events import EventLog
from resilience.tiered.client import TieredClient
from resilience.tiered.loader import whole_steps
from tests.resilience.state.nodes import PlainView
from tests.resilience.tiered.daemons import Daemon
from tests.training.groups import make_group
from tests.training.jobs import make_job
from tests.training.tiered.runs import tiered
from training.backends.tiered import TieredCheckpoints
from training.checkpoints import Subject
from training.plan import plan_placement


class NoProgress:
    """A run of which there is nothing to say."""

    def __init__(self) -> None:
        self.rest: dict[str, Any] = {}

    def take_rest(self, rest: dict[str, Any]) -> None:
        self.rest = rest

    def check(self) -> None:
        """Find nothing wrong."""


def make_subject(view: Any, progress: Any = None, **parts: Any) -> Subject:
    """Return what checkpoints are of, for one worker alone unless `group` says else."""
    group = parts.pop("group", None) or make_group(world_size=1)
    return Subject(
        state=parts.pop("state", view),
        view=view,
        progress=progress or NoProgress(),
        group=group,
        placement=plan_placement(group.layout, group.rank),
        num_samples=1000,
        **{"stall_s": 60.0, **parts},
    )


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TieredClient]:
    with Daemon(folder=tmp_path / "arena").start() as daemon:
        yield daemon.client()


@pytest.fixture
def saves(tmp_path: Path, client: TieredClient) -> TieredCheckpoints:
    job = make_job(resilience={"tiered": tiered(every_n_steps=4)})
    assert job.resilience.tiered is not None
    saves = TieredCheckpoints(
        client,
        job,
        job.resilience.tiered,
        EventLog(tmp_path / "events.jsonl", node="n0", rank=0, generation=0),
    )
    view = PlainView([torch.ones(9)], {"view": {}, "recovery": {}})
    saves.bind(make_subject(view))
    return saves


def go_on() -> None:
    """Nothing is wrong."""


def fail() -> None:
    raise CorruptionError("a bit has changed")


def finish(saves: TieredCheckpoints, check: Any) -> None:
    saves.finish(4, generation=0, is_forced=True, pulse=go_on, check=check)


def test_save_is_visible_when_it_is_kept(saves: TieredCheckpoints, client: TieredClient) -> None:
    saves.begin_step(4, generation=0, is_requested=False, pulse=go_on)
    saves.before_update(go_on)
    before = whole_steps(client)
    saves.keep()
    saves.abandon()
    saves.finish(
        5,
        generation=0,
        is_forced=False,
        pulse=go_on,
        check=fail,
    )

    assert before == []
    assert [each.step for each in whole_steps(client)] == [4]


def test_last_save_is_visible_only_if_its_state_is_right(
    saves: TieredCheckpoints, client: TieredClient
) -> None:
    with pytest.raises(CorruptionError):
        finish(saves, fail)
    saves.abandon()
    before = whole_steps(client)

    finish(saves, go_on)

    assert before == []
    assert [each.step for each in whole_steps(client)] == [4]
