"""The command `attach`: the display that a run has where it was started, on one that goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from launcher.clusters.local_files import log_path, node_name
from launcher.clusters.running.cluster import Cluster, RunFolder
from launcher.clusters.running.kinds import cluster_of
from launcher.clusters.running.requests import read_request
from launcher.clusters.running.slurm_nodes import newest_logs
from launcher.commands.sight import Sight, find_run, see_run
from launcher.commands.status import status_lines
from launcher.job.cluster import LocalCluster, SlurmCluster
from launcher.monitor.console import RunConsole
from launcher.monitor.runstate import RunState
from launcher.monitor.standing import Phase, Standing, decide_standing
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
    standing = sight.standing
    with RunConsole(run.job, cluster.events(run), logs, None) as shown:
        is_silent = False
        while standing.phase is Phase.UNREACHABLE or standing.phase.is_alive:
            if standing.phase is Phase.UNREACHABLE and not is_silent:
                shown.say(f"the cluster gives no answer: {standing.why}")
            is_silent = standing.phase is Phase.UNREACHABLE
            end_s = time.monotonic() + _ASK_S
            while time.monotonic() < end_s:
                shown.refresh()
                time.sleep(shown.refresh_s)
            # Before the events are read a last time: what they tell of an end is then seen.
            said = cluster.status(run)
            cluster.events(run)
            shown.refresh()
            standing = decide_standing(said, shown.state, read_request(run), time.time())
        shown.finish(_failed_node(standing, shown.state, logs))
        why = f": {standing.why}" if standing.why else ""
        shown.say(f"{run.job.name} has ended: {standing.phase.value}{why}")
        if shown.state.exit_status is not None:
            shown.say(summary_text(shown.state, None))
        else:
            # The end that a scheduler has seen stands in no event.
            shown.say("\n".join(status_lines(see_run(run, cluster))[1:]))


def _node_logs(run: RunFolder) -> dict[str, Path]:
    """Return the log of each node by the name that it has in events, as far as they lie here."""
    if isinstance(run.job.cluster, LocalCluster):
        names = map(node_name, range(run.job.num_nodes_started))
        return {name: log_path(run.path, name) for name in names}
    return newest_logs(run) if isinstance(run.job.cluster, SlurmCluster) else {}


def _failed_node(standing: Standing, state: RunState, logs: dict[str, Path]) -> str | None:
    """Return the node that failed first, where the run has failed and its log lies here."""
    if standing.phase is not Phase.FAILED:
        return None
    if state.failure is not None and state.failure.node in logs:
        return state.failure.node
    return next((name for name in logs if standing.why.startswith(f"{name} ")), None)
