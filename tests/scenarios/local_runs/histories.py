"""What the events of a run, and of the runs that it branched from, tell of each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience.events import Event, EventReader

History = dict[int, dict[str, Any]]
"""For each step its loss and learning rate, and which start of which run took it."""


def history(runs: Sequence[Path]) -> History:
    """Return what each step came to at last; each run is a branch of the one before it."""
    found: History = {}
    for number, run in enumerate(runs):
        for each in _events(run):
            if each.event == "run_branched":
                begun = each.fields["from_step"]
                found = {step: what for step, what in found.items() if step < begun}
            elif each.event == "step" and (each.step not in found or _is_taken(each)):
                assert each.step is not None
                start = (number, each.fields["start"])
                values = {name: each.fields[name] for name in ("loss", "lr")}
                found[each.step] = {**values, "start": start}
    return found


@dataclass
class Trace:
    """One run with the branches that were made of it, and what was done to them."""

    folder: Path
    told: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=lambda: ["run"])
    """Of the run, and of each branch of the one before."""

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.names[-1]

    def steps(self) -> History:
        return history([self.folder / "runs" / name for name in self.names])

    def describe(self) -> str:
        return f"{self.names}: {self.told}"

    def assert_same(self, wanted: History) -> None:
        """Fail where a step had another loss, or was taken by an earlier start than one before."""
        found = self.steps()
        losses = [{step: each["loss"] for step, each in taken.items()} for taken in (found, wanted)]
        assert losses[0] == losses[1], self.describe()
        starts = [found[step]["start"] for step in sorted(found)]
        assert starts == sorted(starts), self.describe()


def newest_stored(run: Path) -> int:
    """Return the newest step that the events of a run tell to be in its store, 0: none."""
    return max((each.step or 0 for each in _events(run) if each.event == "step_stored"), default=0)


def _events(run: Path) -> list[Event]:
    return EventReader(run / "events.jsonl").read_new()


def _is_taken(event: Event) -> bool:
    """Return whether a step was taken, and not just written again by who went on from it."""
    return event.fields["duration_s"] is not None
