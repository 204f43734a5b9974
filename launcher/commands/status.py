"""The commands `status` and `runs`: how one run stands, or all below a folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.clusters.running.cluster import read_run_folder
from launcher.clusters.running.kinds import cluster_of
from launcher.clusters.running.memory import find_memory, has_checkpoints
from launcher.clusters.running.requests import read_size
from launcher.commands.sight import RUNS_FOLDER, Sight, find_run, run_folders, see_run, sight_of
from launcher.commands.stored import stored_steps
from launcher.errors import LauncherError, OutsideError, RecipeError, system_failure
from launcher.monitor.checkpoints import missed_text, newest_saved
from launcher.monitor.duration import format_seconds
from launcher.monitor.logs import plain
from launcher.monitor.progress import render_recovery
from launcher.monitor.standing import JobStatus, Phase
from launcher.monitor.standstill import standstill_text
from launcher.monitor.storage import storage_text
from launcher.rundir import is_full
from resilience.run_record import RecordError, read_record, read_starts

UNREACHABLE_STATUS = 1
_WARNINGS_MAX = 3


def print_status(word: str, start: Path) -> int:
    """Print how a run stands; returns 1 where its cluster gives no answer, else 0."""
    run = find_run(word, start)
    sight = see_run(run, cluster_of(run.job))
    for line in status_lines(sight):
        sys.stdout.write(f"{plain(line)}\n")
    return UNREACHABLE_STATUS if sight.standing.phase is Phase.UNREACHABLE else 0


def status_lines(sight: Sight) -> list[str]:
    """Return a run's standing as a person reads it."""
    run, standing, state = sight.run, sight.standing, sight.state
    why = f": {' '.join(standing.why.splitlines())}" if standing.why else ""
    rows = {
        "recipe": f"{state.recipe} version {state.version}",
        "began": _beginnings(run.path),
        "where": _where(sight),
        "doing": doing_text(sight),
        "size": size_text(sight),
        "steps": _steps(sight),
        "faults": _faults(sight),
        "safe": _safe(sight),
        "warned": _warned(sight),
        "lost": "; ".join(state.losses),
        "code": state.code_text,
        "events": "; left out: ".join([_events_text(sight), *sight.left_out]),
        "left": _left(sight),
        "next": _next(sight),
        "folder": f"{run.path}{', whose disk is full' if is_full(run.path) else ''}",
    }
    lines = [f"{run.job.name}: {standing.phase.value}{why}"]
    return lines + [f"  {name:<8}  {text}" for name, text in rows.items() if text]


def _warned(sight: Sight) -> str:
    """Return the newest warnings of a run that goes on, each with its age."""
    if not sight.standing.phase.is_alive:
        return ""
    newest = sorted(sight.state.warnings.items(), key=lambda each: each[1])[-_WARNINGS_MAX:]
    ages = [(text, format_seconds(max(0.0, sight.time - at))) for text, at in newest]
    return "; ".join(f"{text} ({age} ago)" for text, age in ages)


def _beginnings(folder: Path) -> str | None:
    """Return how often the run was started, and of which other one it is a branch.

    None for a run of one start that is no branch, and where its record is not here.
    """
    try:
        record, starts = read_record(folder), read_starts(folder)
    except (OSError, RecordError) as error:
        return str(error)
    times = f"started {len(starts)} times" if len(starts) > 1 else ""
    point = record.branch if record else None
    branch = f"with step {point.step} of {point.run}" if point else ""
    return ", ".join(filter(None, (branch, times))) or None


def _where(sight: Sight) -> str:
    kind, job_id = sight.run.job.cluster.kind, sight.run.job_id
    place = f" on {sight.standing.place}" if sight.standing.place else ""
    return f"{kind}{f', job {job_id}' if job_id else ''}{place}"


def doing_text(sight: Sight) -> str:
    """Return what a run that runs is doing, and whom it waits for; nothing of another one."""
    return ", ".join(filter(None, (_doing(sight), _standstill(sight))))


def _doing(sight: Sight) -> str | None:
    if sight.standing.phase is not Phase.RUNNING:
        return None
    state = sight.state
    if state.is_deserted:
        return "waiting for a node: none that trained is left"
    waits = state.awaited_text(sight.time)
    if state.silent_nodes and not waits:
        return f"waiting for {', '.join(sorted(state.silent_nodes))}: not heard from"
    late = "".join(f", {text}" for _, text in sorted(state.late_batches.items())[:1])
    # Of a node that was killed nobody else may be left to tell.
    text = f"{state.phase} ({state.num_here} of {state.num_workers} workers){late}"
    return ", ".join(filter(None, (text, waits)))


def _standstill(sight: Sight) -> str | None:
    """Return for how long a run that runs has taken no step, where that is longer than usual."""
    if sight.standing.phase is not Phase.RUNNING:
        return None
    return standstill_text(sight.state.standstill_s(sight.time))


def _missing(sight: Sight) -> str:
    """Return which nodes have not joined a run that runs and has not begun."""
    is_running = sight.standing.phase is Phase.RUNNING
    return sight.state.missing_text(sight.time) if is_running else ""


def size_text(sight: Sight) -> str | None:
    """Return how many nodes a run has that may change that, how many it is to have, and why not.

    None for a run of one size, and for one that does not run.
    """
    run, state = sight.run, sight.state
    if run.job.resilience.elastic is None or sight.standing.phase is not Phase.RUNNING:
        return None
    # Before there is a generation nobody knows how many nodes it will have.
    now = state.num_workers // state.num_devices if state.has_opened else None
    # A scheduler gives a run any of its sizes.
    begun = run.job.trainer.num_nodes if run.job.cluster.kind == "local" else now
    wanted = read_size(run.path) or begun
    reason, until = state.waits
    if reason and until is not None:
        reason += f", for {format_seconds(max(0.0, until - sight.time))}"
    leaving = ", ".join(sorted(state.nodes_to_leave))
    gone = [f"{name} {text}" for name, text in sorted(state.gone_nodes.items())]
    parts = [
        "none yet" if now is None else f"{now} {'node' if now == 1 else 'nodes'}",
        f"{wanted} are asked for" if wanted != now else "",
        f"{leaving} to leave" if leaving else "",
        *(gone if now is not None and wanted is not None and wanted > now else []),
        reason,
    ]
    return ", ".join(filter(None, parts))


def _steps(sight: Sight) -> str:
    state = sight.state
    if not state.steps_text:
        return state.unmatched_text
    parts = [state.steps_text, *filter(None, [state.unmatched_text])]
    if state.num_steps and state.loss is not None:
        parts.append(f"loss {state.loss:.4f}")
    is_running = sight.standing.phase is Phase.RUNNING and not state.is_deserted
    is_running = is_running and state.standstill_s(sight.time) is None
    if is_running and state.seconds_per_step is not None:
        parts.append(f"{state.seconds_per_step:.3g} s a step")
        if (left_s := state.seconds_left) is not None:
            parts.append(f"{format_seconds(left_s)} left")
    return ", ".join(parts)


def _faults(sight: Sight) -> str | None:
    recoveries, standing = sight.state.recoveries, sight.standing
    if not recoveries:
        return None
    last = recoveries[-1]
    text = render_recovery(last, has_ended=standing.phase.has_ended)
    if last.surrender and last.surrender in standing.why:
        text = text.removesuffix(f"; {last.surrender}")
    return f"{len(recoveries)}, the last: {text}"


def _safe(sight: Sight) -> str | None:
    """Return the newest step that is kept, and where; None where nothing is."""
    state, newest = sight.state, newest_saved(sight.state.tiers)
    parts = []
    if missed := missed_text(state.tiers, sight.time):
        parts.append(missed)
    elif newest and not sight.standing.phase.has_ended:
        parts.append(f"checkpoint of step {newest.step}")
    elif newest and sight.run.job.cluster.kind != "local":
        # The memory of other machines is not seen from here.
        when = "when it was last seen" if sight.left_out else "when it ended"
        parts.append(f"checkpoint of step {newest.step} {when}")
    elif newest and has_checkpoints(sight.run.path):
        parts.append(f"checkpoint of step {newest.step} in memory")
    if sight.standing.phase.is_alive and state.domains and state.domains[0] < state.domains[1]:
        num, wanted = state.domains
        parts.append(f"copies in {num} of {wanted} failure domains (ram.domains_min)")
    parts.append(_stored(sight, newest.step if newest else None) or "")
    parts.append(f"written to {state.checkpoint}" if state.checkpoint else "")
    return ", ".join(filter(None, parts)) or None


def _stored(sight: Sight, newest_step: int | None) -> str | None:
    """Return how far the run's store is: what was told, and what is seen to have gone since."""
    told = sight.state.storage
    text = storage_text(told, newest_step, sight.time)
    if told.stored_step is None or told.failing:
        return text
    try:
        there = stored_steps(sight.run)
    except OutsideError as error:
        return f"{text}; the store cannot be looked at from here: {error}"
    if there is None:
        return text
    if there.damaged:
        listed = ", ".join(map(str, sorted(there.damaged)))
        text = f"{text}; damaged there: step {listed} ({next(iter(there.damaged.values()))})"
    if told.stored_step in {*there.whole, *there.damaged}:
        return text
    newest = next(iter(there.whole), None)
    if newest is not None and newest > told.stored_step:
        return f"in the store: step {newest}"
    left = "it has no whole step" if newest is None else f"step {newest} is the newest there"
    return f"step {told.stored_step} is not in the store any more: {left}"


def _events_text(sight: Sight) -> str:
    if sight.last_event is None:
        return "none that can be read from here"
    ago = format_seconds(max(0.0, sight.time - sight.last_event))
    if sight.standing.phase is Phase.UNREACHABLE:
        return f"silent for {ago}"
    return f"the last {ago} ago"


def _left(sight: Sight) -> str | None:
    """Return what a run that has ended holds in the memory of this machine."""
    found = find_memory(sight.run) if sight.standing.phase.has_ended else []
    return f"{', '.join(map(str, found))}, which `clean` removes" if found else None


def _next(sight: Sight) -> str | None:
    """Return what goes on with a run that did not come to its end, and has kept a state."""
    standing, state = sight.standing, sight.state
    has_state = newest_saved(state.tiers) or state.storage.stored_step is not None
    if not has_state or standing.phase not in (Phase.CANCELLED, Phase.FAILED):
        return None
    return f"launcher continue {shlex.quote(str(sight.run.path))}"


def print_runs(arguments: Sequence[str], start: Path) -> int:
    """Print a line for each run below ./runs or a folder; returns as print_status does."""
    if len(arguments) > 1:
        raise RecipeError("runs takes a folder, or nothing for ./runs")
    parent = start / (arguments[0] if arguments else RUNS_FOLDER)
    if arguments and not parent.is_dir():
        raise RecipeError(f"no folder {arguments[0]!r}")
    silent: dict[str, JobStatus] = {}
    rows = [(str(path.relative_to(parent)), *_row(path, silent)) for path in run_folders(parent)]
    if not rows:
        sys.stdout.write(f"no runs below {parent}\n")
        return 0
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)]
        sys.stdout.write(f"{plain('  '.join(cells).rstrip())}\n")
    return UNREACHABLE_STATUS if silent else 0


def _row(path: Path, silent: dict[str, JobStatus]) -> tuple[str, str, str, str]:
    """Return state, steps, cluster and reason; a cluster that is silent is not asked again."""
    try:
        run = read_run_folder(path)
        kind = run.job.cluster.kind
        cluster = cluster_of(run.job)
        said = silent.get(kind) or cluster.status(run)
        if said.phase is Phase.UNREACHABLE and kind != "local":
            silent[kind] = said
        sight = sight_of(run, cluster, said)
    except LauncherError as error:
        return "?", "", "", str(error)
    except OSError as error:
        # A file of the run is no plain file, or may not be read.
        return "?", "", "", str(system_failure(error))
    steps = f"step {sight.state.steps_text}" if sight.state.steps_text else ""
    why = _first_line(sight.standing.why) or _standstill(sight) or _missing(sight) or ""
    return sight.standing.phase.value, steps, kind, "; ".join(filter(None, (why, *sight.left_out)))


def _first_line(text: str) -> str:
    """Return the first line, and the second one where the first one announces it by a colon."""
    lines = text.splitlines()
    return " ".join(lines[: 2 if text.partition("\n")[0].endswith(":") else 1])
