"""How long each system takes to go on after a fault, and what the fault cost it.

    python -m benchmarks.recovery [-n 3] [--trainer megatron] [--systems ours,torchrun]

Every system trains the same job: once undisturbed, and per kind of fault in one run with all
faults, or in one run per fault where a killed rank is not replaced. Times are medians with
extremes, in seconds, less a normal step.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import figures, machine
from benchmarks.faultbench import Limits, Run, System, make_plan, run_folder, run_job
from benchmarks.faults import plan_steps
from benchmarks.jobplan import MICRO_BATCH, NUM_RANKS, Fault, Kind, Place
from benchmarks.ours import OURS, OURS_MEGATRON, PROTECTED, TRAINER
from benchmarks.peers import NVRX, NVRX_FAST, PEERS, TORCHFT, TORCHRUN, TORCHRUN_MEGATRON

SYSTEMS = {
    "torch": {system.name: system for system in (OURS, PROTECTED, TRAINER, *PEERS)},
    "megatron": {system.name: system for system in (OURS_MEGATRON, TORCHRUN_MEGATRON)},
}
"""By trainer."""
DEFAULT = {
    "torch": (OURS, TORCHRUN, NVRX, NVRX_FAST, TORCHFT),
    "megatron": (OURS_MEGATRON, TORCHRUN_MEGATRON),
}
KINDS: dict[str, tuple[Kind, Place]] = {
    "exception": ("exception", "backward"),
    "kill": ("kill", "backward"),
    "stop": ("stop", "backward"),
    "exception in update": ("exception", "update"),
    "kill in update": ("kill", "update"),
}
FIRST_STEP = 8


@dataclasses.dataclass(slots=True, kw_only=True)
class Row:
    """One system under one kind of fault."""

    system: str
    kind: str
    note: str = ""
    ends: list[str] = dataclasses.field(default_factory=list)
    normal_step_s: float | None = None
    is_equal: bool | None = None
    planned: int = 0
    faults: list[figures.FaultFigures] = dataclasses.field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", "--num-faults", type=int, default=3, help="faults of each kind")
    parser.add_argument("--trainer", choices=tuple(SYSTEMS), default="torch")
    parser.add_argument("--systems", help="names of systems, with commas between")
    parser.add_argument("--kinds", type=machine.names_of(KINDS), default=list(KINDS))
    parser.add_argument("--limit", type=float, default=120, help="seconds without a step: given up")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--keep", type=Path, help="copy logs and events of all runs here")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    default = ",".join(system.name for system in DEFAULT[arguments.trainer])
    try:
        read = machine.names_of(SYSTEMS[arguments.trainer])
        arguments.systems = read(arguments.systems or default)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --systems: {error}")
    return arguments


def run_once(
    system: System, faults: tuple[Fault, ...], num_steps: int, arguments: argparse.Namespace
) -> Run:
    """Run a system through some faults and say on stderr how it went."""
    with run_folder(arguments.keep) as folder:
        plan = make_plan(system, folder, num_steps=num_steps, faults=faults)
        run = run_job(system, plan, Limits(stall_s=arguments.limit))
    kinds = ", ".join(fault.kind for fault in faults) or "undisturbed"
    print(f"  {system.name}: {kinds}: {run.end} {run.words}", file=sys.stderr, flush=True)
    return run


def measure(system: System, kinds: list[str], arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure one system; yield a row per kind of fault, also for what could not run."""
    reason = system.missing()
    quiet: dict[int, Run] = {}
    for kind in kinds:
        row = Row(system=system.name, kind=kind, note=reason or "", planned=arguments.num_faults)
        if kind == "stop" and not system.handles_stop:
            row.note = row.note or "not attempted: needs a rescue from outside"
        if KINDS[kind][1] not in system.places:
            row.note = row.note or "not attempted: its worker has no faults there"
        if not row.note:
            fill_row(row, system, quiet, arguments)
        yield row


def fill_row(
    row: Row, system: System, quiet: dict[int, Run], arguments: argparse.Namespace
) -> None:
    """Do the runs of one row; `quiet` keeps undisturbed runs by their number of steps."""
    together = system.replaces_ranks or KINDS[row.kind][0] == "exception"
    per_run = row.planned if together else 1
    num_steps = FIRST_STEP + per_run * system.fault_spacing
    if num_steps not in quiet:
        quiet[num_steps] = run_once(system, (), num_steps, arguments)
    calm = quiet[num_steps]
    if calm.end != "finished":
        row.note = f"undisturbed run {calm.end}: {calm.words}"
        return
    row.normal_step_s = figures.normal_step_s(calm.events)
    equal: list[bool | None] = []
    for _ in range(row.planned // per_run):
        kind, place = KINDS[row.kind]
        faults = plan_steps(
            kind, per_run, first_step=FIRST_STEP, spacing=system.fault_spacing, place=place
        )
        run = run_once(system, faults, num_steps, arguments)
        row.ends.append(f"{run.end} {run.words}".strip())
        row.faults += figures.judge_faults(run.events, num_ranks=NUM_RANKS, micro_batch=MICRO_BATCH)
        equal.append(figures.is_equal(calm.events, run.events))
    row.is_equal = None if None in equal else all(equal)


def render_row(row: Row, limit_s: float) -> str:
    """Render one line of the table."""
    if row.note:
        return f"| {row.system} | {row.kind} | {row.note} | | | | | | |"
    whole = [fault.recovery_s for fault in row.faults if fault.recovery_s is not None]
    first = [fault.survivors_s for fault in row.faults if fault.survivors_s is not None]
    if whole:
        given_up = [end for end in row.ends if not end.startswith("finished")]
        recovery = figures.spread(whole) + "".join(f", then {end.split()[0]}" for end in given_up)
    elif first:
        recovery = "never whole again"
    else:
        recovery = f"no recovery within {limit_s:.0f} s"
    cells = [
        row.system,
        row.kind,
        f"{recovery} [{len(whole)} of {row.planned}]",
        figures.spread(first) if first else "-",
        *(
            " ".join(str(getattr(fault, name)) for fault in row.faults) or "-"
            for name in ("steps_lost", "samples_lost", "ranks_lost")
        ),
        {True: "yes", False: "no", None: "not finished"}[row.is_equal],
        "-" if row.normal_step_s is None else f"{row.normal_step_s * 1e3:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure the chosen systems and print the table."""
    arguments = parse_arguments()
    about = machine.check_load(arguments)
    systems = [SYSTEMS[arguments.trainer][name] for name in arguments.systems]
    for system in systems:
        print(f"{system.name}: {system.what}")
    print(
        "| system | fault | recovery s, all ranks [of] | all but one s | steps lost "
        "| samples lost | ranks lost | same bits | step ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for system in systems:
        for row in measure(system, arguments.kinds, arguments):
            print(render_row(row, arguments.limit), flush=True)
            rows.append(row)
    machine.write_json(arguments.json, about, limit_s=arguments.limit, rows=rows)


if __name__ == "__main__":
    main()
