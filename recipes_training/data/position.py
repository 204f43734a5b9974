"""Where in its data a run is: which sample the first one of a step is. Pure.

The position goes with the state, as three numbers and two texts in the progress's small data. As
long as batch and data stay, step n begins at sample n times the batch. From a step on at which a
run goes on with another batch, it counts in that; with other data, from their first sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

POSITION = "position"
"""In the progress: what `Position` is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Which samples the steps of a run take."""

    step: int = 0
    """The step from which on the batch and the data have been as they are."""
    sample: int = 0
    """The first sample of that step, in the order of the data."""
    batch: int
    """Samples of one step."""
    samples: str = ""
    """What the data's content was told by."""
    source: str = ""
    """What the job said of the data; empty where that was not noted."""

    def sample_of(self, step: int) -> int:
        """Return the first sample of a step."""
        return self.sample + (step - self.step) * self.batch


def read_position(rest: Mapping[str, Any], *, batch: int) -> Position:
    """Return the position that goes with a state; without one its batch has never changed."""
    found = rest.get(POSITION)
    return Position(batch=batch) if found is None else Position(**found)


def next_position(
    known: Position, *, step: int, batch: int, samples: str, source: str
) -> Position | str:
    """Return the position with which a run goes on at a step, or why its data are not the run's.

    Data with other content are taken where the job says something else of them than it did.
    """
    has_changed = known.samples not in ("", samples)
    if has_changed and known.source in ("", source):
        return known.samples
    at = known
    if has_changed:
        at = Position(step=step, batch=batch)
    elif known.batch != batch:
        at = Position(step=step, sample=known.sample_of(step), batch=batch)
    return Position(step=at.step, sample=at.sample, batch=batch, samples=samples, source=source)


def note_position(rest: dict[str, Any], position: Position) -> None:
    """Have the position go with the state."""
    rest[POSITION] = asdict(position)
