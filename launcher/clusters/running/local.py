"""Runs on this machine, each with a launcher that lives as long as it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from launcher.clusters.local_nodes import end_strays
from launcher.clusters.local_run import SCALE_SIGNAL
from launcher.clusters.running.cluster import Cleaned, LogTail, RunFolder
from launcher.clusters.running.detach import LOG_FILE, start_detached
from launcher.clusters.running.folder_logs import open_folder_logs
from launcher.clusters.running.lock import Holder, find_launchers, has_lock_open, read_lock
from launcher.clusters.running.memory import remove_memory
from launcher.clusters.running.requests import user_name, write_size
from launcher.clusters.submission import Submission
from launcher.errors import OutsideError, RecipeError
from launcher.monitor.standing import JobStatus, Phase
from resilience.agent.evidence.locks import LAUNCHER_LOCK


class LocalMachine:
    """This machine, as a cluster without a queue."""

    def submit(self, run: RunFolder) -> Submission:
        """Start the run in the background; returns once its nodes have been started.

        Raises OutsideError with the launcher's words where it ends before that.
        """
        start_detached(run.job, run.path)
        return Submission(command=(), job_id="", output="")

    def status(self, run: RunFolder) -> JobStatus:
        """Return whether the run's launcher lives; its events tell the rest."""
        try:
            holder = read_lock(run.path)
        except OSError as error:
            return JobStatus(phase=Phase.UNREACHABLE, why=str(error))
        if (not holder or (holder.is_here and not holder.is_held)) and find_launchers(run.path):
            return JobStatus(phase=Phase.RUNNING, why=f"its {LAUNCHER_LOCK} was removed or moved")
        return judge_lock(holder)

    def events(self, run: RunFolder) -> Path:
        """Return the file in the run's folder."""
        return run.events

    def logs(self, run: RunFolder, rank: int | None) -> LogTail:
        """Return what the nodes' processes print."""
        return open_folder_logs(run.path, ("logs/*.log",), rank, but=(LOG_FILE,))

    def cancel(self, run: RunFolder) -> None:
        """Signal the run's launcher as Ctrl-C does; a second time ends the nodes at once."""
        holder = read_lock(run.path)
        if holder is None or judge_lock(holder).phase is Phase.FORGOTTEN:
            return
        if not holder.is_here:
            raise OutsideError(f"{run.path} runs on {holder.host}; cancel it there")
        try:
            _signal(run, holder, signal.SIGINT)
        except OSError as error:
            raise OutsideError(
                f"cannot signal the launcher of {run.path}, process {holder.pid}: {error.strerror}"
            ) from error

    def scale(self, run: RunFolder, num_nodes: int) -> None:
        """Write how many nodes the run is to have, and have its launcher read it.

        Raises RecipeError where that is another user's, and OutsideError.
        """
        try:
            holder = read_lock(run.path)
            if holder is None or not holder.is_held:
                raise OutsideError(f"{run.path} has no launcher that runs")
            if not holder.is_here:
                raise OutsideError(f"{run.path} runs on {holder.host}; scale it there")
            owner = Path(f"/proc/{holder.pid}").stat().st_uid
            if os.geteuid() not in (0, owner):
                who = user_name(owner)
                raise RecipeError(f"{run.path} is the run of user {who}; allowed: {who} scales it")
            _signal(run, holder, SCALE_SIGNAL, prepare=lambda: write_size(run, num_nodes))
        except OSError as error:
            raise OutsideError(f"cannot ask the launcher of {run.path}: {error}") from error

    def clean(self, run: RunFolder) -> Cleaned:
        """End what a launcher that was killed has left, and remove its memory on this machine."""
        holder = read_lock(run.path)
        if holder is not None and not holder.is_here and holder.host != os.uname().nodename:
            raise OutsideError(f"{run.path} was started on {holder.host}; clean it there")
        run_id = holder.run_id if holder else ""
        found, left = end_strays(run_id, run_dir=run.path) if run_id else (set[int](), set[int]())
        memory = remove_memory(run)
        return Cleaned(
            removed=(*(f"process {pid}" for pid in sorted(found - left)), *memory.removed),
            left=(*(f"process {pid}, which SIGKILL does not end" for pid in left), *memory.left),
        )


def judge_lock(holder: Holder | None) -> JobStatus:
    """Return what a run's lock says of it."""
    if holder is None:
        return JobStatus(phase=Phase.FORGOTTEN, why="no launcher has taken it up")
    if holder.is_held:
        return JobStatus(phase=Phase.RUNNING, place=holder.host)
    if holder.is_here:
        return JobStatus(phase=Phase.FORGOTTEN, why="its launcher was killed")
    if holder.host == os.uname().nodename:
        return JobStatus(phase=Phase.FORGOTTEN, why=f"{holder.host} has been started again")
    why = f"it was started on {holder.host}; ask there"
    return JobStatus(phase=Phase.UNREACHABLE, why=why, place=holder.host)


def _signal(
    run: RunFolder, holder: Holder, number: int, prepare: Callable[[], None] = lambda: None
) -> None:
    """Signal the run's launcher, and do what it needs for that before, if it is to be signalled."""
    file = -1
    with suppress(ProcessLookupError):
        file = os.pidfd_open(holder.pid) if holder.pid else -1
    try:
        # As long as the same launcher has the lock, the descriptor is of no later process.
        if read_lock(run.path) != holder:
            return
        if file == -1 or not has_lock_open(holder.pid, run.path):
            raise OutsideError(
                f"{run.path / LAUNCHER_LOCK} is locked, but by no launcher that is seen from here; "
                "ask it in its container, or end the other program that locks the file"
            )
        prepare()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(file, number)
    finally:
        if file != -1:
            os.close(file)
