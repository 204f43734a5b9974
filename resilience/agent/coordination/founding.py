"""Whether agents that have just come may begin a run, or one goes on that they do not see. Pure.

Where all agents see one folder, its record says who belongs to the run: as long as one of these may
live on behind a broken network, nobody else begins it anew. Without such a folder more than half of
all nodes have to be there, which two groups cannot both have.

A scheduler that starts a run again says by the attempt's number that it has ended the one before.
Two runs of different names in one folder have no order: a Slurm job's number and a Kubernetes Job's
uid say nothing of the other job's processes, which may live on where the scheduler does not reach
them, under the very names of the new ones. So the later one waits until the earlier one has ended
in order, no longer renews its record, or is known to have no process left on any node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import ConfigDict

RENEWAL_S = 60.0
"""How often the coordinator renews the record."""
SILENCE_S = 180.0
"""A record that was not renewed for so long, by the reader's own clock, is nobody's."""
OTHERS_SILENCE_S = 1.5 * RENEWAL_S
"""The same for the record of a run of another name: somebody has put another in its place."""
SLACK = 100
"""Generations that may have been opened since somebody has heard of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Who belongs to a run."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    run: str
    """Name of the run, which all attempts of a scheduler share."""
    attempt: int = 0
    """How often the scheduler had started it again."""
    number: int
    """How often agents have begun it."""
    agents: tuple[str, ...]
    """Names of all that have joined it."""
    generation: int
    """The newest that was opened, or the one before the first."""
    starts: tuple[tuple[str, str], ...] = ()
    """Names, and which start of each was heard of last."""
    gone: tuple[str, ...] = ()
    """Names of those whose last start has ended for certain."""
    renewal: int = 0
    """Counts up as long as somebody coordinates the run."""
    is_over: bool = False
    """Whether the run has ended in order, so that nobody goes on with it."""
    status: int = 0
    """With which exit status it has ended then."""


def judge(
    found: Record | None,
    *,
    run: str,
    attempt: int = 0,
    newcomers: Collection[str],
    unchanged_s: float,
    ended: Collection[str] = (),
) -> Record | str:
    """Return the record under which the newcomers begin the run, or why they may not.

    `ended` are agents of the run that was found of which it is certain that no process lives.
    """
    agents = tuple(sorted(newcomers))
    first = Record(run=run, attempt=attempt, number=0, agents=agents, generation=-1)
    if found is None:
        return first
    if problem := find_others(found, first, unchanged_s, ended):
        return problem
    slack = 0 if found.is_over else SLACK
    return replace(first, number=found.number + 1, generation=found.generation + slack)


def find_others(found: Record, own: Record, unchanged_s: float, ended: Collection[str]) -> str:
    """Return who may go on with what the record is of; empty where nobody does."""
    if found.run != own.run:
        is_dead = set(found.agents) <= {*ended, *found.gone}
        if found.is_over or unchanged_s >= OTHERS_SILENCE_S or is_dead:
            return ""
        what = f"job {found.run}" if found.run.isdecimal() else f"run {found.run!r}"
        return f"{', '.join(found.agents)} may go on with {what} in the same folder"
    if found.attempt > own.attempt:
        return refuse_attempt(own.attempt, found.attempt)
    left = sorted(set(found.agents) - set(own.agents) - set(ended) - set(found.gone))
    if found.is_over or found.attempt < own.attempt or not left or unchanged_s >= SILENCE_S:
        return ""
    return f"{', '.join(left)} may go on with the run"


def note_agents(
    before: Record,
    agents: Collection[str],
    starts: Mapping[str, str],
    *,
    here: Collection[str],
    gone: Collection[str] = (),
) -> Record:
    """Return the record with who has come to the run, and who has ended, by one coordinator.

    Of those that are not with it others may have heard since.
    """
    known = dict(before.starts)
    newest = {**starts, **known, **{name: starts[name] for name in here if name in starts}}
    ended = {name: known.get(name) for name in before.gone}
    ended |= {name: starts.get(name) for name in gone}
    return replace(
        before,
        agents=tuple(sorted({*agents, *before.agents})),
        starts=tuple(sorted(newest.items())),
        gone=tuple(sorted(name for name in ended if ended[name] == newest.get(name))),
    )


def refuse_attempt(attempt: int, newest: int) -> str:
    """Return why an attempt may not begin the run, whose folder has seen a newer one."""
    where = f"attempt {attempt} of the run is refused: its folder has seen attempt {newest}"
    how = "faultCount of HyperPod's operator, or --rdzv-attempt"
    return f"{where}; allowed: at least {newest} ({how}), or another run folder"


def attempt_name(run: str, attempt: int) -> str:
    """Return the name under which agents of one attempt find each other, and no others."""
    return f"{run}-{attempt}"


def is_earlier(name: str, other: str) -> bool:
    """Return whether two attempts' names are of one run, and the first is of an earlier attempt."""
    run, _, attempt = name.rpartition("-")
    other_run, _, other_attempt = other.rpartition("-")
    are_numbers = attempt.isdecimal() and other_attempt.isdecimal()
    return run == other_run and are_numbers and int(attempt) < int(other_attempt)
