"""Starting a run from the files of its folder: on this machine, or as a submission."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from contextlib import nullcontext

from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.kinds import cluster_of
from launcher.errors import OutsideError
from launcher.holding import held_folder
from launcher.job.cluster import LocalCluster
from launcher.rundir import SUBMITTED_FILE, write_submission


def start_run(run: RunFolder, *, is_detached: bool, is_new: bool = True) -> int:
    """Start a run on this machine, or submit it; returns the exit status.

    A run on this machine is waited for, unless it is detached. Its folder is held until it ends:
    by this function for a new run, by the caller for one that goes on. Raises OutsideError; the
    folder of a new submission can be used again then.
    """
    if isinstance(run.job.cluster, LocalCluster):
        with held_folder(run.path) if is_new else nullcontext():
            return _start_here(run, is_detached=is_detached)
    try:
        submission = cluster_of(run.job).submit(run)
    except OutsideError:
        if is_new:
            (run.path / SUBMITTED_FILE).unlink(missing_ok=True)
        raise
    write_submission(run.path, dataclasses.asdict(submission))
    sys.stdout.write(f"submitted job {submission.job_id}: {shlex.join(submission.command)}\n")
    if submission.warning:
        sys.stderr.write(f"note: {submission.warning}\n")
    return 0


def _start_here(run: RunFolder, *, is_detached: bool) -> int:
    if not is_detached:
        from launcher.clusters.local_run import run_nodes

        return run_nodes(run.job, run.path)
    # Its process is a fork of this one, and holds the folder with it.
    cluster_of(run.job).submit(run)
    sys.stdout.write(
        f"{run.job.name} goes on in the background; see it with `status`, `logs -f` and `attach`, "
        f"end it with `cancel`, each followed by {shlex.quote(str(run.path))}\n"
    )
    return 0
