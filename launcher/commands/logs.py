"""The command `logs`: what a run has printed, by time, the first error first."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.clusters.running.cluster import LogLine, LogTail
from launcher.clusters.running.kinds import cluster_of
from launcher.commands.sight import Sight, find_run, see_run
from launcher.composition.choice import nearest
from launcher.errors import OutsideError, RecipeError
from launcher.monitor.duration import format_seconds
from launcher.monitor.logs import begins_start, failure_lines, plain
from launcher.monitor.standing import Phase, first_error

_PAUSE_S = 0.5
_FAR_PAUSE_S = 2.0
"""Where each look asks a server for every pod."""
OUTAGE_S = 600.0
"""Seconds without an answer of the cluster after which a followed run is given up."""
_ASK_S = 5.0
"""How often the cluster is asked whether a run that is followed goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What `logs` is asked for."""

    run: str
    rank: int | None = None
    follows: bool = False


def parse_log_options(arguments: Sequence[str]) -> LogOptions:
    """Read the command line of `logs`. Raises RecipeError."""
    words, rank, follows = [], None, False
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if argument in ("-f", "--follow"):
            follows = True
        elif name == "--rank":
            value = value if equals else next(waiting, "")
            if not value.isdecimal():
                raise RecipeError(f"--rank {value!r}: allowed: the number of a rank, from 0")
            rank = int(value)
        elif argument.startswith("-"):
            near = nearest(argument, ("--rank", "-f", "--follow"))
            raise RecipeError(f"logs has no option {argument!r}; {near}")
        else:
            words.append(argument)
    if len(words) != 1:
        raise RecipeError(f"logs takes one run, not {len(words)}; `runs` shows them")
    return LogOptions(run=words[0], rank=rank, follows=follows)


def print_logs(arguments: Sequence[str], start: Path) -> int:
    """Print the lines of a run, and go on until its end where that is asked for."""
    options = parse_log_options(arguments)
    run = find_run(options.run, start)
    world_size = run.job.trainer.world_size
    if options.rank is not None and options.rank >= world_size:
        raise RecipeError(
            f"--rank {options.rank} is no rank of the run; allowed: 0 to {world_size - 1}"
        )
    cluster = cluster_of(run.job)
    tail = cluster.logs(run, options.rank)
    lines = tail.read_new()
    sight = see_run(run, cluster)
    _print_failure(sight, lines)
    _print_lines(lines)
    if not options.follows:
        if not lines:
            standing = sight.standing
            words = ": ".join(filter(None, (standing.phase.value, standing.why)))
            sys.stderr.write(f"{run.job.name} has no lines to show; it is {words}\n")
        return 0
    asked_s = time.monotonic()
    if sight.standing.phase is Phase.UNREACHABLE:
        raise OutsideError(sight.standing.why)
    goes_on = sight.standing.phase.is_alive
    while goes_on:
        time.sleep(_FAR_PAUSE_S if run.job.cluster.kind == "k8s" else _PAUSE_S)
        if time.monotonic() - asked_s > _ASK_S:
            phase, asked_s = cluster.status(run).phase, time.monotonic()
            # A scheduler that is away for a while says nothing of the run.
            goes_on = not phase.has_ended
        _print_lines(await_lines(tail))
    _print_lines(await_lines(tail))
    return 0


def await_lines(tail: LogTail) -> Sequence[LogLine]:
    """Return the lines that are new, also after an outage of what they come from.

    Raises OutsideError where that is longer than OUTAGE_S.
    """
    end_s = time.monotonic() + OUTAGE_S
    told, limit = "", format_seconds(OUTAGE_S)
    while True:
        try:
            return tail.read_new()
        except (OutsideError, OSError) as error:
            if time.monotonic() >= end_s:
                raise OutsideError(
                    f"no lines for {limit}, so they are no longer followed; the run may go on, and "
                    f"the same command follows it again: {error}"
                ) from error
            if not told:
                told = (
                    f"no lines for now, asking again for {limit}: {str(error).splitlines()[-1]}\n"
                )
                sys.stderr.write(told)
            time.sleep(_FAR_PAUSE_S)


def _print_failure(sight: Sight, lines: Sequence[LogLine]) -> None:
    """Print why the run failed, if it did: by its events, and the first traceback."""
    if sight.standing.phase is not Phase.FAILED:
        return
    failure = sight.state.failure
    message = None if failure is None else str(failure.fields.get("message", ""))
    error = sight.standing.error
    shown = [error or sight.standing.why]
    if error in ("", first_error(sight.state)):
        shown += failure_lines([line.text for line in _of_last_start(lines)], message)
    for text in shown:
        sys.stdout.write(f"first error: {plain(text)}\n")
    sys.stdout.write("\n")


def _of_last_start(lines: Sequence[LogLine]) -> list[LogLine]:
    """Return what each source has said since the last start of the run that it tells of."""
    begun = {line.source: at for at, line in enumerate(lines) if begins_start(line.text)}
    return [line for at, line in enumerate(lines) if at > begun.get(line.source, -1)]


def _print_lines(lines: Sequence[LogLine]) -> None:
    for line in lines:
        sys.stdout.write(f"{line.source}: {plain(line.text)}\n")
    sys.stdout.flush()
