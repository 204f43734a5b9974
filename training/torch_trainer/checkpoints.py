"""Checkpoints that a run takes while it goes on, and begins from. These here are none.

A run without resilience.tiered has `Checkpoints` itself, and imports nothing of that
feature; `checkpoint_backend.open_checkpoints` returns what the job asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from training.group import WorkerGroup

if TYPE_CHECKING:  # a run without the feature imports nothing of it
    from resilience.state.torch_state import TorchState
    from resilience.state.view import StateView

STALL_S = 10.0
"""How long a copy of the state may stand still before it is given up."""
FINISH_TIMEOUT = timedelta(seconds=60)
"""How long the workers may take to have all ended their last update."""

SAVE_DUE = "save_due"
"""In the progress: a worker has asked for a checkpoint of this very state."""

Pulse = Callable[[], None]
"""Shows that the worker gets on while it waits; may raise to end the wait."""


class Progress(Protocol):
    """Who knows how far a run is, beside the state itself."""

    rest: dict[str, Any]
    """Small data that goes with the state; replaced by a new dict at each update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The state that a run goes on from."""

    step: int
    source: str
    """The tier: ram, peer:NODE, s3 or folder."""


class Checkpoints:
    """Takes none, and finds none."""

    def bind(
        self,
        view: StateView,
        progress: Progress,
        group: WorkerGroup,
        *,
        state: TorchState,
        stall_s: float,
    ) -> None:
        """Take what the checkpoints are of, in each generation anew.

        `state` is what the view shows, as torch has it. `stall_s` is for how long a copy may
        hold up an update without getting on.
        """

    def load_newest(self, group: WorkerGroup, *, newer_than: int | None) -> Begun | None:
        """Load the newest state that all workers can have; None where none is newer.

        Every worker calls it. After a None the tensors may hold anything.
        """
        return None

    def begin_run(self, group: WorkerGroup, step: int) -> None:
        """Begin a history that goes on from a step, and makes void what others did after it.

        Every worker calls it. What tells histories apart is part of the progress from then on.
        """

    def wants_save(self) -> bool:
        """Say whether this worker asks for a checkpoint after the step that is being taken."""
        return False

    def begin_step(self, step: int, *, generation: int, is_requested: bool, pulse: Pulse) -> bool:
        """Begin to save the state after `step` updates, if it is due, before a forward begins.

        `generation` made the last of them, -1 for a state that was loaded or is the first.
        Returns whether it is due, the same on every worker. Raises nothing but what `pulse`
        does, as all others.
        """
        return False

    def before_update(self, pulse: Pulse) -> None:
        """Return when the update may write: what was begun is copied. The step is stable."""

    def keep(self) -> None:
        """Let what was begun become visible: the state, looked at since, is as it should be.

        Does not block.
        """

    def abandon(self) -> None:
        """Leave what was begun, as if it had never been: the step may have another outcome."""

    def finish(
        self,
        step: int,
        *,
        generation: int,
        is_forced: bool,
        group: WorkerGroup,
        pulse: Pulse,
        check: Callable[[], None],
    ) -> None:
        """Save the last state, if it is due or `is_forced`, and wait until that is done.

        Every worker calls it, with all steps done. `check` raises where the state is not what
        its last update left; that ends the save.
        """

    def close(self) -> None:
        """End what the checkpoints need."""
