"""The command `scale`: have a run go on with another number of nodes."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.clusters.running.cluster import Cluster, RunFolder
from launcher.clusters.running.kinds import cluster_of
from launcher.commands.sight import Sight, find_run, see_run
from launcher.commands.status import doing_text, size_text
from launcher.errors import OutsideError, RecipeError
from launcher.job.workload import ScriptTrainer
from launcher.monitor.runstate import RunState
from launcher.monitor.standing import Phase

WAIT_S = 300.0
"""How long `--wait` waits: nodes start, and are there for a while before the run grows by them."""
_PAUSE_S = 0.5
_TELL_S = 15.0
"""Seconds between two lines of `--wait` on what the run is doing."""


def scale_run(arguments: Sequence[str], start: Path) -> int:
    """Ask a run for another size, and wait for it where that is asked for."""
    words = [each for each in arguments if each != "--wait"]
    if len(words) != 2 or not words[1].startswith("nodes="):
        given = f", and not {shlex.join(arguments)!r}" if arguments else ""
        raise RecipeError(f"scale takes a run and nodes=N, and may be told to --wait{given}")
    run = find_run(words[0], start)
    num_nodes = _read_size(words[1].removeprefix("nodes="), run)
    cluster = cluster_of(run.job)
    sight = see_run(run, cluster)
    phase, why = sight.standing.phase, sight.standing.why
    if phase is Phase.UNREACHABLE:
        raise OutsideError(f"{run.job.name} was not asked: {why}")
    if not phase.is_alive:
        raise RecipeError(
            f"{run.job.name} has ended: {phase.value}{f', {why}' if why else ''}; it goes on at "
            f"another size with launcher continue {shlex.quote(str(run.path))} "
            f"trainer.num_nodes={num_nodes}"
        )
    cluster.scale(run, num_nodes)
    if "--wait" in arguments:
        _wait(run, cluster, num_nodes, sight.state)
    else:
        sys.stdout.write(f"{run.job.name} is asked to go on with {num_nodes} nodes\n")
    return 0


def _read_size(text: str, run: RunFolder) -> int:
    elastic = run.job.resilience.elastic
    if isinstance(run.job.trainer, ScriptTrainer):
        raise RecipeError(
            f"nodes={text!r}: {run.job.name} keeps its size, since it runs a script, which was "
            "started for so many processes; give it another trainer.num_nodes when it has ended"
        )
    if elastic is None:
        raise RecipeError(
            f"nodes={text!r}: {run.job.name} keeps its size, since its resilience.elastic is null; "
            "start a run with resilience/elastic=default to scale it"
        )
    if text not in map(str, elastic.sizes):
        allowed = ", ".join(map(str, elastic.sizes))
        raise RecipeError(f"nodes={text!r} is no size of {run.job.name}; allowed: {allowed}")
    return int(text)


def _wait(run: RunFolder, cluster: Cluster, num_nodes: int, before: RunState) -> None:
    """Return once the run trains with so many nodes. Raises OutsideError where it does not."""
    end_s = time.monotonic() + WAIT_S
    tell_s, text = time.monotonic() + _TELL_S, ""
    while time.monotonic() < end_s:
        sight = see_run(run, cluster)
        if sight.standing.phase.has_ended:
            raise OutsideError(f"{run.job.name} has ended: {sight.standing.phase.value}")
        if trains_with(sight.state, num_nodes):
            sys.stdout.write(f"{run.job.name} goes on with {num_nodes} nodes\n")
            return
        if lost := nodes_lost(before, sight.state, num_nodes):
            raise OutsideError(
                f"{run.job.name} does not come to {num_nodes} nodes: {lost}; another scale starts "
                "nodes in the place of those"
            )
        text = waited_for(sight)
        if time.monotonic() >= tell_s:
            tell_s += _TELL_S
            sys.stderr.write(f"{run.job.name} is not there yet: {text}\n")
        time.sleep(_PAUSE_S)
    raise OutsideError(
        f"{run.job.name} has not come to {num_nodes} nodes within {WAIT_S:g} s: {text}"
    )


def waited_for(sight: Sight) -> str:
    """Return what a run does that has not its size yet, in the words of `status`. Pure."""
    standing = sight.standing
    text = "; ".join(filter(None, (doing_text(sight), size_text(sight))))
    return text or ": ".join(filter(None, (standing.phase.value, standing.why)))


def nodes_lost(before: RunState, now: RunState, num_nodes: int) -> str:
    """Return which nodes have ended that a run needs to grow, and how; empty for none. Pure."""
    if before.has_opened and before.num_workers >= num_nodes * before.num_devices:
        return ""
    return ", ".join(
        f"{name} {text}"
        for name, text in sorted(now.gone_nodes.items())
        if name not in before.gone_nodes and name not in now.leaving_nodes
    )


def trains_with(state: RunState, num_nodes: int) -> bool:
    """Return whether so many nodes train, with all workers there and none of those to leave. Pure.

    A node to leave counts only while it trains: it may have ended with the run.
    """
    has_size = state.has_opened and state.num_workers == num_nodes * state.num_devices
    is_whole = has_size and len(state.workers) == state.num_workers
    return is_whole and not state.nodes_to_leave & state.training_nodes
