"""The set-up of a program that recovers: its groups last, and a late process runs it alone."""

from __future__ import annotations

import importlib.util
import os

from resilience.comm.messages import Open
from resilience.inprocess.handles import read_handles
from resilience.inprocess.plain import own_opening, own_store
from resilience.state.report import Report

PAST_SET_UP = "set_up"
"""In a report's `rest`: this rank has the notes of all set-ups; how far its program is."""
_NOTES = "set_up/notes"


def serve_groups() -> None:
    """Have the groups that a program makes last, where its run recovers and torch is there."""
    handles, opening = read_handles(os.environ), own_opening()
    if handles is None or not handles.recovers or opening is None:
        return
    if importlib.util.find_spec("torch") is None:
        return
    from resilience.inprocess.lasting import SetUp, begin_set_up

    is_late = any(map(_is_past, opening.read_reports()))
    begin_set_up(SetUp(_read_notes if is_late else None))


def teller_of_notes(opening: Open) -> int | None:
    """Return the rank that gives notes to late processes; None where no rank needs any."""
    past = [each.rank for each in opening.read_reports() if _is_past(each)]
    return past[0] if past and len(past) < len(opening.read_reports()) else None


def write_notes(store: object, notes: str) -> None:
    """Give the notes of all set-ups to the processes that join the store's generation."""
    store.set(_NOTES, notes)  # type: ignore[attr-defined]


def _read_notes() -> str:
    store = own_store()
    assert store is not None
    return bytes(store.get(_NOTES)).decode()


def _is_past(report: Report) -> bool:
    return bool(report.rest.get(PAST_SET_UP))
