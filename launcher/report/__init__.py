"""What is left of a run for a person: a page with its curves, and a few lines of text."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from launcher.errors import OutsideError, RecipeError
from launcher.job import Job, read_job
from launcher.report.page import build_page
from launcher.report.record import build_record
from launcher.report.summary import summary_text
from launcher.rundir import EVENTS_FILE, JOB_FILE, write_whole
from resilience.events import Event, EventReader

__all__ = ["REPORT_FILE", "summary_text", "write_report"]

REPORT_FILE = "report.html"
_NUM_NOTES_MAX = 5


def write_report(run_dir: Path) -> Path:
    """Make report.html in a run's folder from its events and its job alone.

    The page needs no other file and no network. Raises RecipeError where the
    folder holds no run, and OutsideError where the page cannot be made.
    """
    job = _read_job(run_dir)
    events, notes = _read_events(run_dir / EVENTS_FILE)
    path = run_dir / REPORT_FILE
    try:
        # Half a second that only a report has to pay.
        from plotly.offline import get_plotlyjs

        page = build_page(build_record(job, events), notes, get_plotlyjs())
    except ImportError as error:
        raise OutsideError(
            "a report needs plotly; install it, or training-recipes[train]"
        ) from error
    try:
        write_whole(path, page)
    except OSError as error:
        raise OutsideError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _read_job(run_dir: Path) -> Job:
    path = run_dir / JOB_FILE
    try:
        return read_job(path)
    except OSError as error:
        raise RecipeError(
            f"no run in {run_dir}: cannot read job.json: {error.strerror or error}"
        ) from error
    except ValidationError as error:
        raise RecipeError(
            f"{path} is no job of this version: {error.errors()[0]['msg']}"
        ) from error


def _read_events(path: Path) -> tuple[list[Event], list[str]]:
    """Return the events, and what a reader of the report has to know about the log."""
    if not path.exists():
        raise RecipeError(f"no run in {path.parent}: it has no {path.name}")
    reader, events, notes = EventReader(path), [], []
    while True:
        try:
            new = reader.read_new()
        except ValueError as error:
            notes.append(f"left out: {error}")
            continue
        if not new:
            break
        events += new
    if reader.num_torn:
        notes.append(f"left out: {reader.num_torn} lines whose writer died within them")
    more = [f"left out: {len(notes) - _NUM_NOTES_MAX} more lines"]
    return events, notes[:_NUM_NOTES_MAX] + more * (len(notes) > _NUM_NOTES_MAX)
