"""What checkpoints are of, where no trainer and no loop is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipes_training.checkpoints import Subject
from recipes_training.plan import plan_placement
from tests.recipes_training.groups import make_group
from tests.recipes_training.jobs import make_job


def go_on() -> None:
    """Nothing is wrong."""


class NoProgress:
    """A run of which there is little to say; `check` says whether its state is right."""

    step_generation = 0

    def __init__(
        self, rest: dict[str, Any] | None = None, *, check: Callable[[], None] = go_on
    ) -> None:
        self.rest: dict[str, Any] = rest or {}
        self.check = check

    def take_rest(self, rest: dict[str, Any]) -> None:
        self.rest = rest


def make_subject(view: Any, progress: Any = None, **parts: Any) -> Subject:
    """Return what checkpoints are of, for one worker alone unless `group` says else."""
    group = parts.pop("group", None) or make_group(world_size=1)
    return Subject(
        state=parts.pop("state", view),
        view=view,
        progress=progress or NoProgress(),
        group=group,
        placement=plan_placement(make_job().trainer, group.layout, group.rank),
        pulse=go_on,
        **{"stall_s": 60.0, **parts},
    )
