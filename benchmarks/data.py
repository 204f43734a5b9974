"""What batches from the cache cost, beside torch's loaders and a slice of a numpy memmap.

    python -m benchmarks.data [--rows read,flow,...] [--laps 5] [--json FILE]

A batch has 64 KiB in one tensor. Figures are medians of laps, in which all systems of a row
have their turn, after a lap that warms up; what they sum up is checked.

- read: a cached batch read, checked and summed by a consumer, and the same sum of a slice;
  loaders make the batch at that time.
- flow: the producer alone, and through a consumer, beside loaders with a worker.
- resume: the first batch at sample 0 and far into a map-style dataset, on an empty cache.
- memory: consumers that hold the same batches, against one copy of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks import data_figures as figures
from benchmarks import machine
from benchmarks.data_plan import Plan, write_plan
from benchmarks.jobplan import RUN_DIR_VARIABLE
from benchmarks.processes import end_processes

ROOT = Path(__file__).parents[1]
ROW_TIMEOUT_S = 900.0


def run_row(name: str, plan: Plan) -> figures.Measured:
    """Run one row in processes of its own; the benchmark ends where it fails."""
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.data_{name}", write_plan(plan)]
    environment = {**os.environ, RUN_DIR_VARIABLE: str(plan.folder)}
    path = plan.folder / "log"
    try:
        with path.open("w") as log:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=ROW_TIMEOUT_S
            )
    finally:
        end_processes(str(plan.folder))
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{path.read_text()[-4000:]}")
    return figures.Measured(**json.loads((plan.folder / "figures.json").read_text()))


def run_rows(names: Sequence[str], plan: Plan) -> dict[str, figures.Measured]:
    """Run the rows that are wanted, each in a folder of its own."""
    rows: dict[str, figures.Measured] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-data-") as folder:
            rows[name] = run_row(name, dataclasses.replace(plan, folder=Path(folder)))
    return rows


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--rows",
        type=machine.names_of(figures.FIGURES),
        default=list(figures.FIGURES),
        help=f"of {', '.join(figures.FIGURES)}",
    )
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--read", type=int, default=512, help="batches of a lap of reading")
    parser.add_argument("--made", type=int, default=4000, help="batches of a lap of the producer")
    parser.add_argument("--consumers", type=int, default=8, help="of the row of memory")
    parser.add_argument("--resume", type=int, default=10_000_000, help="the far sample")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    if min(arguments.laps, arguments.consumers) < 1 or arguments.read < 64:
        parser.error("want --laps and --consumers of 1 or more, --read of 64 or more")
    if arguments.made < 100 or arguments.resume % 8:
        parser.error("want --made of 100 or more, --resume a multiple of 8")
    return arguments


def find_versions() -> dict[str, str]:
    """Print and return the versions of what ours is compared with."""
    versions = dict.fromkeys(("numpy", "torch", "torchdata"), "not installed")
    for name in versions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    print(" | ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    return versions


def main() -> None:
    """Measure, print the table and the bars, write them as JSON where asked."""
    arguments = read_arguments()
    about = {**machine.check_load(arguments), **find_versions()}
    plan = Plan(
        folder=Path("/dev/shm"),
        laps=arguments.laps,
        num_read=arguments.read,
        num_made=arguments.made,
        num_consumers=arguments.consumers,
        resume_sample=arguments.resume,
    )
    rows = run_rows(arguments.rows, plan)
    bars = figures.judge(rows)
    for line in figures.format_table(rows):
        print(line)
    for bar in bars:
        print(bar)
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    machine.write_json(
        arguments.json, about, plan=json.loads(write_plan(plan)), rows=rows,
        bars=[{**dataclasses.asdict(each), "is_held": each.is_held} for each in bars],
    )  # fmt: skip


if __name__ == "__main__":
    main()
