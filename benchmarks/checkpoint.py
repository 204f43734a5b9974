"""What checkpoints in memory cost, beside the limits and the peers.

    python -m benchmarks.checkpoint [--rows ours,memory,...] [--laps 5] [--json FILE]

Four ranks hold a state of their own each, 512 MiB in tensors of mixed sizes. Every row's
processes measure a clone into touched memory in the same laps. Figures are medians, from
the first rank's begin to the last rank's end, after a lap that warms up; times of a clone
are of the row's own one. Every restore is compared bit by bit.

- blocked: what training waits for a save. Ours while a device computes elsewhere, for
  which a sleep of three clones stands; and in line, on busy cores.
- own RAM: from the begin of the save until the step outlives the trainer.
- peer RAM: until another node has it, over TCP; for ours another daemon on this machine.
- restores: by the ranks, by new processes, and where another node alone has it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import checkpoint_figures as figures
from benchmarks import machine
from benchmarks.checkpoint_nodes import find_ports, run_daemon
from benchmarks.checkpoint_state import Plan, show, write_plan
from benchmarks.peers import PYTHON as PEERS_PYTHON
from benchmarks.peers import ROOT

AWS_PYTHON = Path(os.environ.get("AWS_TIERED_VENV", ROOT / ".venv-aws-tiered")) / "bin/python"
OWN_PYTHON = Path(sys.executable)
ROW_TIMEOUT_S = 900.0
AWS_STEPS = 5
"""How many steps a daemon of AWS's library needs room for: three, the next, and the old one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A module that is run by itself, and in which environment."""

    title: str
    module: str
    python: Path = OWN_PYTHON
    case: str = ""
    server: Callable[[Plan], contextlib.AbstractContextManager[str]] | None = None
    """Runs a daemon and gives its URL."""
    is_peer: bool = True


@contextlib.contextmanager
def run_door(plan: Plan) -> Iterator[str]:
    """Run memoryd with its HTTP door."""
    (port,) = find_ports(1)
    budget_mib = AWS_STEPS * plan.num_ranks * (plan.mib_per_rank + 2)
    address = f"127.0.0.1:{port}"
    with run_daemon(plan.folder / "door", budget_mib, ["--http", address]):
        yield f"http://{address}"


@contextlib.contextmanager
def run_minimal(plan: Plan) -> Iterator[str]:
    """Run the minimal daemon."""
    del plan
    (port,) = find_ports(1)
    command = [sys.executable, "-m", "benchmarks.checkpoint_minimal", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            daemon.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            daemon.terminate()


def torch_row(title: str, case: str) -> Row:
    """Return a row of torch's own savers."""
    return Row(title=title, module="checkpoint_torch", case=case)


ROWS = {
    figures.OURS: Row(title="ours", module="checkpoint_ours", is_peer=False),
    figures.MEMORY: Row(title="ours, memory", module="checkpoint_memory", is_peer=False),
    figures.DOOR: Row(
        title="AWS's library, memoryd",
        module="checkpoint_aws",
        python=AWS_PYTHON,
        server=run_door,
    ),
    figures.MINIMAL: Row(
        title="AWS's library, a minimal daemon",
        module="checkpoint_aws",
        python=AWS_PYTHON,
        server=run_minimal,
    ),
    "torch.save": torch_row("torch.save to /dev/shm", "save"),
    "dcp-thread": torch_row("DCP async_save, thread", "thread"),
    "dcp-thread-cached": torch_row("the same, cached stager", "thread cached"),
    "dcp-process": torch_row("DCP async_save, process", "process"),
    "dcp-process-cached": torch_row("the same, shared cached stager", "process cached"),
    "nvrx": Row(title="NVRx local, replication 2", module="checkpoint_nvrx", python=PEERS_PYTHON),
}


def run_row(row: Row, plan: Plan) -> figures.Laps:
    """Run one row in processes of its own; the benchmark ends where it fails."""
    with contextlib.ExitStack() as stack:
        options = {"case": row.case}
        if row.server is not None:
            options["url"] = stack.enter_context(row.server(plan))
        text = write_plan(dataclasses.replace(plan, options=options))
        command = [str(row.python), "-W", "ignore", "-m", f"benchmarks.{row.module}", text]
        log = stack.enter_context((plan.folder / "log").open("w+"))
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, process_group=0)
        stack.callback(end_group, process)
        status = process.wait(ROW_TIMEOUT_S)
        if status:
            log.seek(0)
            raise SystemExit(f"{row.title} ended with {status}:\n{log.read()[-4000:]}")
    laps: figures.Laps = json.loads((plan.folder / "figures.json").read_text())
    return laps


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever a row has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_rows(arguments: argparse.Namespace, plan: Plan) -> dict[str, figures.Laps]:
    """Run the rows that are wanted and can run here."""
    rows: dict[str, figures.Laps] = {}
    for name in arguments.rows:
        row = ROWS[name]
        if not row.python.exists():
            show(f"{name} is left out: there is no {row.python}")
            continue
        show(f"{name} ...")
        laps = arguments.peer_laps if row.is_peer else arguments.laps
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-checkpoint-") as folder:
            rows[name] = run_row(row, dataclasses.replace(plan, folder=Path(folder), laps=laps))
    return rows


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--rows",
        type=machine.names_of(ROWS),
        default=list(ROWS),
        help=f"of {', '.join(ROWS)}",
    )
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--peer-laps", type=int, help="of the others (default: as many)")
    parser.add_argument("--mib-per-rank", type=int, default=512, help="at least 8")
    parser.add_argument("--tensors", type=int, default=128, help="of a rank, 64 to 256")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.laps < 1 or arguments.mib_per_rank < 8 or not 64 <= arguments.tensors <= 256:
        parser.error("want --laps of 1 or more, --mib-per-rank of 8 or more, --tensors 64 to 256")
    arguments.peer_laps = arguments.peer_laps or arguments.laps
    return arguments


def main() -> None:
    """Measure, print the table and the bars, write them as JSON where asked."""
    arguments = read_arguments()
    about = machine.check_load(arguments)
    plan = Plan(
        folder=Path("/dev/shm"),
        mib_per_rank=arguments.mib_per_rank,
        num_tensors=arguments.tensors,
    )
    rows = run_rows(arguments, plan)
    bars = figures.judge(rows, plan.num_bytes)
    for line in figures.format_table(rows, {name: row.title for name, row in ROWS.items()}):
        print(line)
    if ours := rows.get(figures.OURS):
        print(f"memcpy by one rank alone: {statistics.median(ours['memcpy']):.3f} s")
    for bar in bars:
        print(bar)
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    machine.write_json(
        arguments.json, about, rows=rows,
        mib_per_rank=plan.mib_per_rank, num_ranks=plan.num_ranks, num_tensors=plan.num_tensors,
        bars=[{**dataclasses.asdict(each), "is_held": each.is_held} for each in bars],
    )  # fmt: skip


if __name__ == "__main__":
    main()
