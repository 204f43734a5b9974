"""Shows what a worker does within its steps, and lets faults strike there."""

from __future__ import annotations

from collections.abc import Callable, Collection

from recipes_training.coordinator import Members
from resilience.comm.page import Activity
from resilience.faults.injector import Injector
from resilience.state.rng import seed_micro_batch


class RunWatch:
    """A `recipes_training.trainer.StepWatch`. `requests` is what this worker asks of all.

    Each micro batch draws its random numbers from `seed`, the step and its place in the step.
    """

    def __init__(self, requests: Callable[[], int], *, seed: int) -> None:
        self.requests = requests
        self._seed = seed
        self._first = 0
        self.places: Collection[str] = ()
        self.step = 0
        self._members: Members | None = None
        self._injector: Injector | None = None
        self._activity = Activity.NOWHERE

    def enter(self, members: Members, injector: Injector | None, *, first_micro_batch: int) -> None:
        """Take what belongs to the generation; `injector` fires its faults, if there are any.

        `first_micro_batch` is the number, in the whole step, of this rank's first one.
        """
        self._members, self._injector = members, injector
        self._first = first_micro_batch
        self.places = injector.places if injector else ()

    def leave(self) -> None:
        """Keep nothing of a generation that is over, its groups above all."""
        self._members = None

    def check(self) -> None:
        """Raise BrokenError where the generation is over; cheap."""
        if self._members is not None:
            self._members.check()

    def note(self, activity: Activity) -> None:
        """Note what the worker does for the pulses that follow; shows nothing by itself."""
        self._activity = activity

    def begin(self, step: int, activity: Activity) -> None:
        """Note which step is taken, and what the worker begins to do in it.

        Raises BrokenError where the generation is over, as all methods but `requests` do.
        """
        self.step = step
        self._mark(activity)

    def go_to(self, step: int) -> None:
        """Take note of whose step's faults strike from now on; shows nothing."""
        self.step = step

    def pulse(self) -> None:
        """Show that the worker gets on with what it does."""
        self._mark(self._activity)

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Note that a forward pass begins, and seed what it draws."""
        self._mark(Activity.FORWARD, micro_batch)
        seed_micro_batch(self._seed, self.step, self._first + micro_batch - 1)
        self.reach("forward")

    def backward(self, micro_batch: int) -> None:
        """Note that a backward pass begins."""
        self._mark(Activity.BACKWARD, micro_batch)

    def reach(self, place: str) -> None:
        """Let a fault strike at a place of the step that is taken."""
        if self._injector is not None:
            self._injector.reach(place, self.step)

    def reach_at(self, place: str, step: int) -> None:
        """Let a fault strike at a place of some step."""
        if self._injector is not None:
            self._injector.reach(place, step)

    def _mark(self, activity: Activity, micro_batch: int = 0) -> None:
        assert self._members is not None
        self._activity = activity
        self._members.mark(activity, self.step, micro_batch)
