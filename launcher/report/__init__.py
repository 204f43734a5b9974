"""What is left of a run for a person: a page with its curves, and a few lines of text."""

from __future__ import annotations

import gzip
import json
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.composition.frozen import read_frozen
from launcher.errors import OutsideError, RecipeError
from launcher.job import read_job
from launcher.report.account import account_data, account_of
from launcher.report.page import build_page
from launcher.report.record import RunRecord, build_record
from launcher.report.summary import summary_text
from launcher.rundir import EVENTS_FILE, JOB_FILE, RECIPE_FILE, read_command, write_whole
from resilience.event_files import event_files
from resilience.events import Event, EventReader

__all__ = ["REPORT_FILE", "Report", "read_report", "summary_text", "write_page", "write_report"]

REPORT_FILE = "report.html"
_NUM_NOTES_MAX = 5


@dataclass(frozen=True, slots=True)
class Report:
    """What a run's events and its job amount to, with remarks about the log."""

    record: RunRecord
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Return what programs may want of it, as JSON."""
        record = self.record
        state, recipe = record.state, record.job.recipe
        data = {
            "recipe": recipe.name,
            "version": recipe.version,
            "digest": record.job.digest(),
            "start": record.start,
            "exit_status": state.exit_status,
            "reason": state.reason,
            "num_steps": state.num_steps,
            "max_steps": state.max_steps,
            "num_faults": len(record.recoveries),
            "samples_per_second": record.samples_per_second,
            "tokens_per_second": record.tokens_per_second,
            **account_data(account_of(record)),
            "notes": list(self.notes),
        }
        return json.dumps(data, indent=2) + "\n"


def read_report(run_dir: Path) -> Report:
    """Return what a run's folder tells. Raises RecipeError where it holds no run."""
    job = read_job(run_dir / JOB_FILE)
    events, notes = _read_events(run_dir / EVENTS_FILE)
    return Report(build_record(job, events), tuple(notes))


def write_report(run_dir: Path) -> Path:
    """Make report.html in a run's folder from its events and its job alone.

    The page needs no other file and no network. Raises RecipeError where the
    folder holds no run, and OutsideError where the page cannot be made.
    """
    return write_page(run_dir, read_report(run_dir))


def write_page(run_dir: Path, report: Report) -> Path:
    """Make report.html of what was read. Raises OutsideError where it cannot be made."""
    path = run_dir / REPORT_FILE
    rows = _folder_rows(run_dir)
    try:
        # Half a second that only a report has to pay.
        from plotly.offline import get_plotlyjs

        # With no time in it, so that the same run gives the same page.
        packed = gzip.compress(get_plotlyjs().encode("utf-8"), mtime=0)
        page = build_page(report.record, report.notes, packed, rows)
    except ImportError as error:
        raise OutsideError(
            "a report needs plotly; install it, or training-recipes[train]"
        ) from error
    try:
        write_whole(path, page)
    except OSError as error:
        raise OutsideError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _folder_rows(run_dir: Path) -> list[tuple[str, str]]:
    """Return how a run was begun, what it changes of its version, and where its logs are."""
    rows = []
    if command := read_command(run_dir):
        rows.append(("command line", command))
    with suppress(RecipeError):  # one of an older launcher has none, and goes by job.json
        overrides = read_frozen(run_dir / RECIPE_FILE).overrides
        rows.append(("overrides", shlex.join(overrides) or "none"))
    if (logs := run_dir / "logs").is_dir():
        rows.append(("logs", str(logs)))
    return rows


def _read_events(path: Path) -> tuple[list[Event], list[str]]:
    """Return the events, and what a reader of the report has to know about the log."""
    if not event_files(path):
        raise RecipeError(f"no run in {path.parent}: it has no {path.name}")
    reader = EventReader(path)
    events = reader.read_new()
    notes = [f"left out: {text}" for text in reader.left_out(is_over=True)]
    more = [f"left out: {len(notes) - _NUM_NOTES_MAX} more parts of the log"]
    return events, notes[:_NUM_NOTES_MAX] + more * (len(notes) > _NUM_NOTES_MAX)
