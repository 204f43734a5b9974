"""A cluster that does what a test says, for programs that submit runs and look after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.clusters.running.cluster import Cleaned, LogLine, LogTail, RunFolder
from launcher.clusters.submission import Submission
from launcher.errors import OutsideError
from launcher.monitor.standing import JobStatus, Phase

_SILENT = "the simulated cluster does not answer"


class SimulatedCluster:
    """A cluster in memory: jobs wait until they are begun, and go on until they are ended.

    One thread. Jobs are named by the ids that `submit` gives, counted from 1.
    """

    def __init__(self) -> None:
        self.is_reachable = True
        self.sizes: dict[str, int] = {}
        """Nodes that were asked for, by job."""
        self._jobs: dict[str, JobStatus] = {}
        self._lines: dict[str, list[tuple[int, LogLine]]] = {}
        self._num_jobs = 0

    def submit(self, run: RunFolder) -> Submission:
        """Queue the run."""
        self._answer()
        self._num_jobs += 1
        job_id = str(self._num_jobs)
        self._jobs[job_id] = JobStatus(phase=Phase.QUEUED, why="it waits to be begun")
        self._lines[job_id] = []
        return Submission(command=("simulate", str(run.path)), job_id=job_id, output="")

    def status(self, run: RunFolder) -> JobStatus:
        """Return how the job stands."""
        if not self.is_reachable:
            return JobStatus(phase=Phase.UNREACHABLE, why=_SILENT)
        unknown = JobStatus(phase=Phase.FORGOTTEN, why=f"there is no job {run.job_id!r}")
        return self._jobs.get(run.job_id, unknown)

    def events(self, run: RunFolder) -> Path:
        """Return the file in the run's folder."""
        return run.events

    def logs(self, run: RunFolder, rank: int | None) -> LogTail:
        """Return what `print_line` was called with, for one rank or for all."""
        return _SimulatedTail(self._lines.get(run.job_id, []), rank)

    def cancel(self, run: RunFolder) -> None:
        """End a job that waits or runs."""
        self._answer()
        self._end(run.job_id, JobStatus(phase=Phase.CANCELLED))

    def scale(self, run: RunFolder, num_nodes: int) -> None:
        """Note which size was asked for last."""
        self._answer()
        self.sizes[run.job_id] = num_nodes

    def clean(self, run: RunFolder) -> Cleaned:
        """Take a job that waits out of the queue: there is nothing else to remove."""
        self._answer()
        known = self._jobs.get(run.job_id)
        if known is None or known.phase is not Phase.QUEUED:
            return Cleaned()
        self._end(run.job_id, JobStatus(phase=Phase.CANCELLED))
        return Cleaned(removed=(f"job {run.job_id}",))

    def begin(self, job_id: str, place: str = "n1") -> None:
        """Give a job that waits its nodes."""
        self._jobs[job_id] = JobStatus(phase=Phase.RUNNING, place=place)

    def finish(self, job_id: str, exit_status: int) -> None:
        """Have a job that runs end by itself."""
        phase = Phase.FAILED if exit_status else Phase.SUCCEEDED
        why = f"exit status {exit_status}" if exit_status else ""
        self._end(job_id, JobStatus(phase=phase, why=why))

    def cancel_by(self, job_id: str, user: str) -> None:
        """Have somebody end a job without the launcher."""
        self._end(job_id, JobStatus(phase=Phase.CANCELLED, why=f"cancelled by {user}"))

    def forget(self, job_id: str) -> None:
        """Know nothing of a job any more."""
        del self._jobs[job_id]

    def print_line(self, job_id: str, rank: int, line: LogLine) -> None:
        """Have a rank of a job print something."""
        self._lines[job_id].append((rank, line))

    def _end(self, job_id: str, status: JobStatus) -> None:
        known = self._jobs.get(job_id)
        if known is not None and known.phase.is_alive:
            self._jobs[job_id] = replace(status, place=known.place)

    def _answer(self) -> None:
        if not self.is_reachable:
            raise OutsideError(_SILENT)


class _SimulatedTail:
    def __init__(self, lines: Sequence[tuple[int, LogLine]], rank: int | None) -> None:
        self._lines = lines
        self._rank = rank
        self._num_read = 0

    def read_new(self) -> Sequence[LogLine]:
        """Return the lines that were printed since the last call, by time."""
        new = self._lines[self._num_read :]
        self._num_read += len(new)
        found = [line for rank, line in new if self._rank in (None, rank)]
        return sorted(found, key=lambda line: line.time)
