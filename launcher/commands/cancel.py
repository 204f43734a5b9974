"""The command `cancel`: ask a run for its end, and see it end."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from launcher.clusters.running.cluster import Cluster, RunFolder
from launcher.clusters.running.kinds import cluster_of
from launcher.clusters.running.local import judge_lock
from launcher.clusters.running.lock import find_launchers
from launcher.clusters.running.requests import withdraw_request, write_request
from launcher.commands.sight import RUNS_FOLDER, Sight, find_run, see_run
from launcher.errors import OutsideError, RecipeError
from launcher.monitor.duration import format_seconds
from launcher.monitor.standing import Phase

END_S = 120.0
"""How long a run may take to end: what agents and daemons have for it, and their schedulers."""
_PAUSE_MIN_S = 0.1
_PAUSE_MAX_S = 2.0


def print_cancel(word: str, start: Path) -> int:
    """End a run and say what happened. Raises OutsideError where it goes on."""
    try:
        run = find_run(word, start)
    except RecipeError:
        if not _cancel_removed(word, start):
            raise
        return 0
    cluster, began_s = cluster_of(run.job), time.monotonic()
    sight = see_run(run, cluster)
    if sight.standing.phase is Phase.UNREACHABLE or sight.standing.why == judge_lock(None).why:
        raise OutsideError(f"{run.job.name} was not cancelled: {sight.standing.why}")
    if _cancel_removed(word, start):
        return 0
    if not sight.standing.phase.is_alive:
        sys.stdout.write(f"{run.job.name} has ended before: {_text(sight)}\n")
        return 0
    # Before the run is asked: whoever sees it end then knows why.
    try:
        write_request(run)
    except OutsideError as error:
        sys.stderr.write(f"{error}\n")
    try:
        cluster.cancel(run)
    except OutsideError:
        withdraw_request(run)
        raise
    sight = wait_for_end(run, cluster, END_S)
    took = format_seconds(time.monotonic() - began_s)
    if sight.standing.phase.is_alive or sight.standing.phase is Phase.UNREACHABLE:
        raise OutsideError(
            f"{run.job.name} was asked to end and has not within {took}: {_text(sight)}"
        )
    sys.stdout.write(f"{run.job.name} has ended after {took}: {_text(sight)}\n")
    return 0


def _cancel_removed(word: str, start: Path) -> bool:
    """End the runs of this machine whose folder, or its lock, was removed or moved.

    Returns whether there was one. Raises OutsideError where one goes on.
    """
    # One folder where the word is a whole path.
    folders = {start / word, start / RUNS_FOLDER / word}
    pids = [(folder, pid) for folder in folders for pid in find_launchers(folder)]
    for folder, pid in pids:
        with suppress(ProcessLookupError):
            file = os.pidfd_open(pid)
            try:
                # As long as it has the lock, the descriptor is of no later process.
                if pid in find_launchers(folder):
                    signal.pidfd_send_signal(file, signal.SIGINT)
                if not select.select([file], [], [], END_S)[0]:
                    raise OutsideError(f"process {pid} was asked to end and has not in {END_S:g} s")
            finally:
                os.close(file)
        sys.stdout.write(f"{word} has ended: what {folder} held of it was removed or moved\n")
    return bool(pids)


def wait_for_end(run: RunFolder, cluster: Cluster, timeout_s: float) -> Sight:
    """Return how the run stands once it has ended, or the time is over."""
    end_s, pause_s = time.monotonic() + timeout_s, _PAUSE_MIN_S
    # A scheduler that gives no answer says nothing of the run.
    while not cluster.status(run).phase.has_ended and time.monotonic() < end_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    return see_run(run, cluster)


def _text(sight: Sight) -> str:
    standing = sight.standing
    return f"{standing.phase.value}{f', {standing.why}' if standing.why else ''}"
