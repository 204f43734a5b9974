"""How far a worker is, how it commits a step, and how it gets its state: with recovery or without.

The loop is given one of the two: `resilience.checkpointless.recovery.Recovery`, or
`NoRecovery` here, which has no gate, repairs nothing and ends with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from recipes_training.coordinator import Members
from resilience.state.view import HasRest, StateView

if TYPE_CHECKING:  # a run without the feature imports nothing of it
    from resilience.checkpointless.plan import Fallback
    from resilience.checkpointless.recovery import Resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitHooks:
    """What the loop does within a commit and a recovery."""

    apply: Callable[[int], None]
    """End the update of a step from the gradients in memory, without a collective."""
    reach: Callable[[str, int], None]
    """Let a fault strike at a place of a step."""
    before_update: Callable[[], None]
    """The gate is passed, so the state before it is stable: the last moment to read that."""
    keep: Callable[[], None]
    """That state is what it should be, and so is what was read of it."""


class Progress(HasRest, Protocol):
    """What the loop asks of either kind. Training thread only.

    `rest` goes with the committed state; it is replaced by a new dict at each update.
    """

    @property
    def step(self) -> int:
        """Return how many updates the state has seen, which is the index of the next step."""

    @property
    def step_generation(self) -> int:
        """Return the generation that made the last update; -1 for a loaded or first state."""

    def bind(self, view: StateView) -> None:
        """Take the state that all else is about; before each `resume`."""

    def resume(self, members: Any, start: Callable[[Fallback | None], int]) -> Resumed | None:
        """Bring this rank to the state that the generation begins with; None without recovery.

        Called by every rank. `start` makes or loads a state in place, and returns its step.
        """

    def begin(self) -> None:
        """Begin a forward: gradients of before are valid no more."""

    def pend(self, values: dict[str, Any]) -> None:
        """Have values become a part of `rest` when the update of this step has ended."""

    def commit(self, members: Any) -> AbstractContextManager[None]:
        """Return what the update of this step runs in; the block holds no collective."""

    def check(self) -> None:
        """Raise CorruptionError where the state is not what its last update left."""

    def distrust(self) -> None:
        """Have this rank's state count as unhealthy until it is repaired."""


MakeProgress = Callable[[CommitHooks], Progress]


class NoRecovery:
    """Begins with a start, commits without a gate, and is over with its first fault."""

    def __init__(self, hooks: CommitHooks) -> None:
        self.rest: dict[str, Any] = {}
        self.step = 0
        self.step_generation = -1
        self._hooks = hooks
        self._pending: dict[str, Any] = {}

    def bind(self, view: StateView) -> None:
        """Leave the state alone: nothing is done with it here."""

    def resume(self, members: Members, start: Callable[[Fallback | None], int]) -> None:
        """Begin with the state that `start` makes or loads."""
        self.step = start(None)

    def take_rest(self, rest: dict[str, Any]) -> None:
        """Take over the `rest` of a state that was loaded or made."""
        self.rest = rest

    def begin(self) -> None:
        """Begin a forward."""

    def pend(self, values: dict[str, Any]) -> None:
        """Have values become a part of `rest` when the update has ended."""
        self._pending = values

    @contextmanager
    def commit(self, members: Members) -> Iterator[None]:
        """Run the update: all workers have ended the one before, or this step had no sum."""
        self._hooks.before_update()
        self._hooks.keep()
        yield
        self.rest, self._pending = {**self.rest, **self._pending}, {}
        self.step += 1
        self.step_generation = members.number

    def check(self) -> None:
        """Return: nobody keeps a digest."""

    def distrust(self) -> None:
        """Return: nothing is repaired, and the run is about to end."""
