"""What the loop keeps of a generation that is over."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from training.watch import RunWatch


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
