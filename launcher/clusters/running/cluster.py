"""The seam behind the commands on runs: what every cluster can be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launcher.clusters.submission import Submission
from launcher.errors import OutsideError, RecipeError
from launcher.job import Job, read_job
from launcher.monitor.standing import JobStatus, Phase
from launcher.rundir import EVENTS_FILE, JOB_FILE, SUBMITTED_FILE
from resilience.event_files import event_files
from resilience.plain_files import parse_json, read_plain

ASK_TIMEOUT_S = 30.0
"""How long a scheduler may take for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """A run's folder, and what is written there of how it was started."""

    path: Path
    job: Job
    submitted: Mapping[str, Any] = field(default_factory=dict)
    """The content of submitted.json; nothing of a run on this machine."""

    @property
    def job_id(self) -> str:
        """Return the scheduler's name of the run; empty where it has none."""
        return str(self.submitted.get("job_id", ""))

    @property
    def events(self) -> Path:
        """Return the run's log of events, where the folder is that of its nodes.

        Beside that file each node has one of its own.
        """
        return self.path / EVENTS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line that a process of the run has printed."""

    time: float
    """Unix seconds, as near as it is known: the line's own, or that of what was before it."""
    source: str
    text: str


class LogTail(Protocol):
    """The lines of a run, as they come."""

    def read_new(self) -> Sequence[LogLine]:
        """Return the lines since the last call; never waits for more.

        Raises OutsideError where they cannot be had now; a later call goes on from there.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What was removed of a run, and what is left and why."""

    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Cluster(Protocol):
    """Where runs are. One thread; every call ends, with a program's own deadline at the latest."""

    def submit(self, run: RunFolder) -> Submission:
        """Start the rendered run; each call starts another. Raises OutsideError."""

    def status(self, run: RunFolder) -> JobStatus:
        """Return what is known of the run now; never raises: no answer is Phase.UNREACHABLE."""

    def events(self, run: RunFolder) -> Path:
        """Return the log of the run's events, with what can be had of them now; never raises."""

    def logs(self, run: RunFolder, rank: int | None) -> LogTail:
        """Return what the run prints, from the beginning; of one rank, or of all."""

    def cancel(self, run: RunFolder) -> None:
        """Ask for the run's end and return at once; of a run that has ended it is nothing.

        Raises OutsideError where nobody could be asked.
        """

    def scale(self, run: RunFolder, num_nodes: int) -> None:
        """Ask for another number of nodes of a run that goes on, and return at once.

        Raises RecipeError on a cluster whose runs keep their size, OutsideError where nobody could
        be asked. Asked again it goes on where a call before has failed.
        """

    def clean(self, run: RunFolder) -> Cleaned:
        """Remove what a run that has ended has left beside its folder; may be called again.

        A run that waits in a queue is taken out of it. Raises OutsideError.
        """


def is_alive(said: JobStatus) -> bool:
    """Return whether a run waits or goes on. Raises OutsideError where nobody says."""
    if said.phase is Phase.UNREACHABLE:
        raise OutsideError(said.why)
    return said.phase.is_alive


def read_run_folder(path: Path) -> RunFolder:
    """Read what is written in a run's folder. Raises RecipeError where it holds no run."""
    job = read_job(path / JOB_FILE)
    submitted = path / SUBMITTED_FILE
    if not submitted.exists():
        if not event_files(path / EVENTS_FILE):
            raise RecipeError(f"{path} holds files of a run that was never started")
        return RunFolder(path=path, job=job)
    try:
        # Empty while the submission goes on.
        content = parse_json(read_plain(submitted) or "{}")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecipeError(f"{submitted} cannot be read: {reason}") from error
    return RunFolder(path=path, job=job, submitted=content if isinstance(content, dict) else {})
