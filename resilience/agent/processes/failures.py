"""Which failure a person should see first when the run ends."""

from __future__ import annotations

from collections.abc import Sequence

from resilience.agent.processes.output import Console
from resilience.comm.messages import PLANNED, Failed
from resilience.state.report import Phase, Report


class Failures:
    """Keeps this node's first failure since the run last got on."""

    def __init__(self) -> None:
        self._first: Failed | None = None
        self._step = -1

    def note(self, failed: Failed) -> None:
        """Take in a failure; those that follow from the first one are not kept."""
        if self._first is None and failed.reason != PLANNED:
            self._first = failed

    def open(self, generation: int, reports: Sequence[Report]) -> None:
        """Forget what lies before the last progress, now that a generation opens."""
        step = max((each.step for each in reports if each.phase is not Phase.FRESH), default=-1)
        if step <= self._step:
            return
        self._step = step
        if self._first is not None and self._first.generation < generation - 1:
            self._first = None

    def show(self, console: Console) -> None:
        """Print the first failure's traceback."""
        if (first := self._first) is not None and first.details:
            console.say(f"first failure: rank {first.rank}, generation {first.generation}")
            console.show(first.details)
