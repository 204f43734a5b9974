"""The command `attach`: the display that a run has where it was started, on one that goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launcher.clusters.local_files import log_path, node_name
from launcher.clusters.running.cluster import Cluster, RunFolder
from launcher.clusters.running.kinds import cluster_of
from launcher.clusters.running.slurm_nodes import newest_logs
from launcher.commands.sight import Sight, find_run, see_run
from launcher.job.cluster import LocalCluster, SlurmCluster
from launcher.monitor.console import RunConsole
from launcher.monitor.standing import Phase
from launcher.report.summary import summary_text

_ASK_S = 2.0
"""How often the cluster is asked whether the run goes on."""


def attach(word: str, start: Path) -> int:
    """Show a run until it has ended, or until Ctrl-C, which leaves the run alone."""
    run = find_run(word, start)
    cluster = cluster_of(run.job)
    try:
        sight = _await_begin(run, cluster)
        _show(run, cluster, sight)
    except KeyboardInterrupt:
        sys.stdout.write(f"{run.job.name} goes on; this was its display alone\n")
    return 0


def _await_begin(run: RunFolder, cluster: Cluster) -> Sight:
    """Return how the run stands once it has left its queue; says what it waits for."""
    told = ""
    while True:
        sight = see_run(run, cluster)
        if sight.standing.phase is not Phase.QUEUED:
            return sight
        if sight.standing.why != told:
            told = sight.standing.why
            sys.stdout.write(f"{run.job.name} is queued: {told}\n")
            sys.stdout.flush()
        time.sleep(_ASK_S)


def _show(run: RunFolder, cluster: Cluster, sight: Sight) -> None:
    logs = _node_logs(run)
    with RunConsole(run.job, run.events, logs, None) as shown:
        is_silent = False
        while sight.standing.phase in (Phase.RUNNING, Phase.UNREACHABLE):
            if sight.standing.phase is Phase.UNREACHABLE and not is_silent:
                shown.say(f"the cluster gives no answer: {sight.standing.why}")
            is_silent = sight.standing.phase is Phase.UNREACHABLE
            end_s = time.monotonic() + _ASK_S
            while time.monotonic() < end_s:
                shown.refresh()
                time.sleep(shown.refresh_s)
            sight = see_run(run, cluster)
        shown.finish(_failed_node(sight, logs))
        why = f": {sight.standing.why}" if sight.standing.why else ""
        shown.say(f"{run.job.name} has ended: {sight.standing.phase.value}{why}")
        shown.say(summary_text(shown.state, None))


def _node_logs(run: RunFolder) -> dict[str, Path]:
    """Return the log of each node by the name that it has in events, as far as they lie here."""
    if isinstance(run.job.cluster, LocalCluster):
        names = map(node_name, range(run.job.num_nodes_started))
        return {name: log_path(run.path, name) for name in names}
    return newest_logs(run) if isinstance(run.job.cluster, SlurmCluster) else {}


def _failed_node(sight: Sight, logs: dict[str, Path]) -> str | None:
    """Return the node that failed first, where the run has failed and its log lies here."""
    if sight.standing.phase is not Phase.FAILED:
        return None
    if sight.state.failure is not None and sight.state.failure.node in logs:
        return sight.state.failure.node
    return next((name for name in logs if sight.standing.why.startswith(f"{name} ")), None)
