"""Whether agents that have just come may begin a run, or one goes on that they do not see. Pure.

Where all agents see one folder, its record says who belongs to the run: as long as one of these may
live on behind a broken network, nobody else begins it anew. Without such a folder more than half of
all nodes have to be there, which two groups cannot both have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

RENEWAL_S = 60.0
"""How often the coordinator renews the record."""
SILENCE_S = 180.0
"""A record that was not renewed for so long, by the reader's own clock, is nobody's."""
SLACK = 100
"""Generations that may have been opened since somebody has heard of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Who belongs to a run."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    run: str
    """Name of the run, which is another one for each attempt of a scheduler."""
    number: int
    """How often agents have begun it."""
    agents: tuple[str, ...]
    """Names of all that have joined it."""
    generation: int
    """The newest that was opened, or the one before the first."""
    renewal: int = 0
    """Counts up as long as somebody coordinates the run."""
    is_over: bool = False
    """Whether the run has ended in order, so that nobody goes on with it."""


def judge(
    found: Record | None, *, run: str, newcomers: Collection[str], unchanged_s: float
) -> Record | str:
    """Return the record under which the newcomers begin the run, or why they may not."""
    first = Record(run=run, number=0, agents=tuple(sorted(newcomers)), generation=-1)
    if found is None:
        return first
    number = found.number + 1
    if found.is_over:
        return Record(run=run, number=number, agents=first.agents, generation=found.generation)
    generation = found.generation + SLACK
    left = sorted(set(found.agents) - set(newcomers))
    if found.run == run and left and unchanged_s < SILENCE_S:
        return f"{', '.join(left)} may go on with the run"
    return Record(run=run, number=number, agents=first.agents, generation=generation)
