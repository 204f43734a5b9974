"""The command `clean`: remove what a run left beside its folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from launcher.clusters.running.kinds import cluster_of
from launcher.clusters.running.requests import write_request
from launcher.commands.sight import find_run, see_run
from launcher.errors import OutsideError, RecipeError
from launcher.holding import held_folder
from launcher.monitor.standing import Phase


def print_clean(word: str, start: Path) -> int:
    """Remove what a run has left, and say what; returns 1 where something stays.

    Raises RecipeError while the run goes on.
    """
    run = find_run(word, start)
    cluster = cluster_of(run.job)
    standing = see_run(run, cluster).standing
    if standing.phase is Phase.UNREACHABLE:
        raise OutsideError(f"{run.job.name} was not cleaned: {standing.why}")
    if standing.phase is Phase.RUNNING:
        raise RecipeError(
            f"{run.job.name} is running; end it first, with `cancel {shlex.quote(word)}`, or wait "
            "for its end"
        )
    if standing.phase is Phase.QUEUED:
        write_request(run)
    with held_folder(run.path):
        cleaned = cluster.clean(run)
    for each in cleaned.removed:
        sys.stdout.write(f"removed {each}\n")
    if not cleaned.removed and not cleaned.left:
        sys.stdout.write(f"{run.job.name} has left nothing beside {run.path}\n")
    for each in cleaned.left:
        sys.stderr.write(f"left: {each}\n")
    return 1 if cleaned.left else 0
