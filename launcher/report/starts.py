"""The starts of a run, each with its own events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from resilience.events import Event

_BEGINS = {"run_started", "run_continued", "run_branched"}
"""What the launcher writes before anybody else of a start does."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run, in seconds since the run's first began."""

    begin_s: float
    end_s: float
    num_workers: int
    """How many it was to have."""


def cut_starts(events: Iterable[Event]) -> list[list[Event]]:
    """Cut a run's events, in the order of their log, where it was started again.

    A start begins with the launcher's word, where the launcher runs it, and with that of its first
    agent, which knows the start by a name.
    """
    starts: list[list[Event]] = [[]]
    name: object = None
    has_begun = False
    for event in events:
        told = event.fields.get("start") if event.event == "agent_started" else None
        has_ended = event.event in _BEGINS and has_begun
        if has_ended or (None not in (told, name) and told != name):
            starts.append([])
            name, has_begun = None, False
        name = told if told is not None else name
        has_begun |= event.event not in _BEGINS
        starts[-1].append(event)
    return starts
