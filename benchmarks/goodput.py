"""How much of its undisturbed speed each system keeps under a fault every ten seconds.

    python -m benchmarks.goodput [--seconds 120] [--seeds 1,2,3] [--json FILE]

The schedule is computed from the seed alone and is the same for all systems. A fault that is
due while its rank does not train is merged with the outage it falls into; SIGSTOP waits for
its rank, and is never among the last third. A process that is still stopped after 30 s is
killed from outside, which is said. Per system the worst seed is drawn second by second.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures, machine
from benchmarks.faultbench import Limits, Run, System, make_plan, run_folder, run_job
from benchmarks.faults import plan_schedule
from benchmarks.jobplan import MICRO_BATCH, Fault
from benchmarks.ours import OURS
from benchmarks.peers import PEERS, TORCHFT, TORCHRUN_10

SYSTEMS = {system.name: system for system in (OURS, *PEERS)}
DEFAULT = (OURS, TORCHRUN_10, TORCHFT)
ENDLESS = 10**9
RESCUE_S = 30.0
LETTERS = {"exception": "e", "kill": "k", "stop": "s"}


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """One system under one schedule, or undisturbed with seed None."""

    system: str
    seed: int | None
    end: str
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    planned: int = 0
    num_events: dict[str, int] = dataclasses.field(
        default_factory=lambda: {"faulted": 0, "merged": 0, "rescued": 0}
    )
    first_difference: int | None = None
    by_second: list[int] = dataclasses.field(default_factory=list)
    marks: list[tuple[float, str]] = dataclasses.field(default_factory=list)


def judge_run(run: Run, *, system: str, seed: int | None, seconds: float) -> Result:
    """Turn the events of a run into its figures; a window that never opened has no steps."""
    result = Result(system=system, seed=seed, end=f"{run.end} {run.words}".strip())
    result.by_second = [0] * int(seconds)
    if run.began_s is None:
        return result
    began_s, until_s = run.began_s, run.began_s + seconds
    steps = figures.keep_steps(run.events, began_s, until_s)
    result.steps_per_s = len(steps) / seconds
    result.samples_per_s = sum(step.world for step in steps) * MICRO_BATCH / seconds
    result.by_second = figures.count_by_second(steps, began_s, int(seconds))
    for event in run.events:
        if began_s <= event.at_s < until_s and event.word in result.num_events:
            result.num_events[event.word] += 1
            letter = LETTERS.get(event.values.get("kind", ""), "R")
            if event.word != "merged":
                result.marks.append((event.at_s - began_s, letter))
    return result


def render_result(result: Result, quiet: Result) -> str:
    """Render one line of the table, relative to the run without faults."""
    different = result.first_difference
    cells = [
        result.system,
        str(result.seed),
        f"{result.steps_per_s:.2f} of {quiet.steps_per_s:.2f}",
        f"{share(result.steps_per_s, quiet.steps_per_s):.1%}",
        f"{share(result.samples_per_s, quiet.samples_per_s):.1%}",
        f"{result.num_events['faulted']} of {result.planned}",
        str(result.num_events["rescued"]),
        "none" if different is None else f"from step {different}",
        result.end,
    ]
    return "| " + " | ".join(cells) + " |"


def share(value: float, whole: float) -> float:
    """Return a part of a whole, and nothing of nothing."""
    return value / whole if whole else 0.0


def render_time_line(result: Result, quiet: Result) -> str:
    """Render a run as two lines: what happened, and how fast it was in each second."""
    seconds = len(result.by_second)
    marks = figures.draw_marks(result.marks, seconds)
    line = figures.draw_time_line(result.by_second, quiet.steps_per_s)
    idle = line.count(".")
    head = f"{result.system}, seed {result.seed} (worst), {idle} s of {seconds} without a kept step"
    return f"{head}\n  {marks}\n  {line}"


def run_once(
    system: System, faults: Sequence[Fault], arguments: argparse.Namespace, seed: int | None
) -> tuple[Run, Result]:
    """Run a system for the window, with or without faults."""
    with run_folder(arguments.keep) as folder:
        plan = make_plan(system, folder, num_steps=ENDLESS, faults=tuple(faults))
        limits = Limits(stall_s=arguments.limit, rescue_s=RESCUE_S)
        run = run_job(system, plan, limits, window_s=arguments.seconds)
    result = judge_run(run, system=system.name, seed=seed, seconds=arguments.seconds)
    result.planned = len(faults)
    words = f"  {system.name}: seed {seed}: {result.end}, {result.steps_per_s:.2f} steps/s"
    print(words, file=sys.stderr, flush=True)
    return run, result


def measure(system: System, arguments: argparse.Namespace) -> list[Result]:
    """Measure one system undisturbed and under each seed, and print its lines."""
    if reason := system.missing():
        print(f"| {system.name} | {reason} | | | | | | | |", flush=True)
        return []
    quiet_run, quiet = run_once(system, (), arguments, None)
    results = []
    for seed in arguments.seeds:
        faults = plan_schedule(seed, arguments.seconds, mean_gap_s=arguments.mean_gap)
        run, result = run_once(system, faults, arguments, seed)
        result.first_difference = figures.first_difference(quiet_run.events, run.events)
        print(render_result(result, quiet), flush=True)
        results.append(result)
    return [quiet, *results]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="length of the window")
    parser.add_argument("--mean-gap", type=float, default=10, help="seconds per fault on average")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument(
        "--systems", type=machine.names_of(SYSTEMS), default=[system.name for system in DEFAULT]
    )
    parser.add_argument("--limit", type=float, default=90, help="seconds without a step: given up")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--keep", type=Path, help="copy logs and events of all runs here")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    return arguments


def print_schedules(arguments: argparse.Namespace) -> None:
    """Print what is planned: second, kind and rank of each fault."""
    for seed in arguments.seeds:
        faults = plan_schedule(seed, arguments.seconds, mean_gap_s=arguments.mean_gap)
        words = " ".join(f"{fault.at_s:.0f}{LETTERS[fault.kind]}{fault.rank}" for fault in faults)
        print(f"seed {seed}: {words}")


def main() -> None:
    """Measure the chosen systems, print the table and the time lines."""
    arguments = parse_arguments()
    about = machine.check_load(arguments)
    print_schedules(arguments)
    print("| system | seed | steps/s | steps | samples | faults | rescues | other numbers | end |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    results = {name: measure(SYSTEMS[name], arguments) for name in arguments.systems}
    print("\ne exception, k SIGKILL, s SIGSTOP, R killed from outside 30 s after it;")
    print("# at least 3/4 of the undisturbed speed, + slower, . no kept step in this second\n")
    for rows in results.values():
        if len(rows) > 1:
            quiet, *disturbed = rows
            worst = min(disturbed, key=lambda result: result.steps_per_s)
            print(render_time_line(worst, quiet), flush=True)
    runs = [result for rows in results.values() for result in rows]
    machine.write_json(arguments.json, about, seconds=arguments.seconds, runs=runs)


if __name__ == "__main__":
    main()
