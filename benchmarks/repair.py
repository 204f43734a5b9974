"""What it costs to give a rank its state back, beside a memcpy and a load from a checkpoint.

Two processes of one node with a state of --gib GiB each (parameters and AdamW's
moments). Measured in the receiving process, medians of --rounds:

- memcpy: one thread copies the state's tensors between pages that are there.
- repair, living: both processes live and have all their memory; checksums included.
- repair, spare: the receiver was just forked and has touched its memory.
- DCP load: torch.distributed.checkpoint reads the same state from /dev/shm into
  tensors that were touched.

Starting processes, importing, building the model and meeting in a process group
are in none of them: whatever way the state takes, they are needed. CPU seconds are
those of the receiving thread: on a busy machine they say more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW

from resilience.state.arena import Arena, create_arena
from resilience.state.digest import digest_state
from resilience.state.move import run_transfers
from resilience.state.torch_state import TorchState, materialise

ROW = 1024
BYTES_PER_VALUE = 12
"""A float32 parameter and its two moments."""
TIMEOUT = timedelta(minutes=2)
MEMCPY, LIVING, SPARE, DCP = "memcpy", "repair, living", "repair, spare", "DCP load"
MEMCPY_SHARE_MIN, DCP_FACTOR_MIN = 0.6, 5.0
Seconds = tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """What all processes of the benchmark know."""

    gib: float
    rounds: int
    arena: int
    folder: Path

    def open_group(self, rank: int, name: str) -> ProcessGroup:
        """Return a group of both ranks, whose connections are up."""
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(self.folder / name), 2
        )
        group = cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, TIMEOUT))
        group.barrier().wait()
        return group

    def open_arena(self) -> Arena:
        """Map the arena and touch it."""
        arena = Arena(self.arena, 2)
        arena.touch()
        return arena

    @property
    def seconds(self) -> Path:
        """Return the file of (name, wall, CPU) that the processes append to."""
        return self.folder / "seconds.jsonl"

    def note(self, name: str, seconds: Seconds) -> None:
        """Keep one figure."""
        with self.seconds.open("a") as file:
            file.write(json.dumps([name, *seconds]) + "\n")


def make_state(gib: float, value: float) -> TorchState:
    """Return a touched state: matrices and vectors as in a transformer, all values alike."""
    rows_left = int(gib * 2**30 / BYTES_PER_VALUE / ROW)
    parameters = []
    while rows_left > 0:
        for rows in (1, 1024, 1024, 256, 256, 2816, 2816, 1, 2816):
            taken = max(0, min(rows, rows_left))
            parameters.append(nn.Parameter(torch.full((taken, ROW), value)))
            rows_left -= taken
    module = nn.ParameterList(parameters)
    optimizer = AdamW(module.parameters())
    materialise(optimizer)
    state = TorchState(module, optimizer)
    for each in state.tensors():
        each.tensor.fill_(value)
    return state


def timed(run: Callable[[], object]) -> Seconds:
    """Return the seconds that a call takes, by the clock and of this thread's CPU."""
    began, began_cpu = time.perf_counter(), time.thread_time()
    run()
    return time.perf_counter() - began, time.thread_time() - began_cpu


def repair(state: TorchState, rank: int, group: ProcessGroup, arena: Arena) -> Seconds:
    """Move the state from rank 0 to rank 1."""
    group.barrier().wait()
    return timed(
        lambda: run_transfers(
            [(0, 1, True)], view=state, rank=rank, group=group, arena=arena, local_ranks=[0, 1]
        )
    )


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy with one thread."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def run_source(plan: Plan) -> None:
    """Be the rank that has the state, for the living rank and then for each spare."""
    state, arena = make_state(plan.gib, 1.0), plan.open_arena()
    (plan.folder / "digest").write_text(digest_state(state))
    group = plan.open_group(0, "living")
    for _ in range(plan.rounds + 1):
        repair(state, 0, group, arena)
    for number in range(plan.rounds):
        repair(state, 0, plan.open_group(0, f"spare-{number}"), arena)


def run_living(plan: Plan) -> None:
    """Be the rank that is repaired again and again; the first round warms up."""
    state, arena = make_state(plan.gib, 0.0), plan.open_arena()
    group = plan.open_group(1, "living")
    targets = [each.tensor for each in state.tensors()]
    sources = [each.clone() for each in targets]
    for number in range(plan.rounds + 1):
        memcpy_s = timed(lambda: copy_all(targets, sources))
        repair_s = repair(state, 1, group, arena)
        if number:
            plan.note(MEMCPY, memcpy_s)
            plan.note(LIVING, repair_s)
    check(plan, state)


def run_spare(plan: Plan, number: int) -> None:
    """Be a process that was kept warm and takes a dead rank's place."""
    state, arena = make_state(plan.gib, 0.0), plan.open_arena()
    plan.note(SPARE, repair(state, 1, plan.open_group(1, f"spare-{number}"), arena))
    check(plan, state)


def run_save(plan: Plan) -> None:
    """Write the checkpoint that is loaded afterwards."""
    state = make_state(plan.gib, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = {each.name: each.tensor for each in state.tensors()}
        save(tensors, checkpoint_id=plan.folder / "checkpoint", no_dist=True)


def run_load(plan: Plan) -> None:
    """Be a process that takes its state from the checkpoint."""
    state = make_state(plan.gib, 0.0)
    tensors = {each.name: each.tensor for each in state.tensors()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = plan.folder / "checkpoint"
        plan.note(DCP, timed(lambda: load(tensors, checkpoint_id=checkpoint, no_dist=True)))
    check(plan, state)


def check(plan: Plan, state: TorchState) -> None:
    """End the benchmark where bits are wrong."""
    if digest_state(state) != (plan.folder / "digest").read_text():
        raise SystemExit("the state that arrived is not the one that was sent")


def fork(run: Callable[[], None]) -> int:
    """Run a function in a process of its own; returns its pid."""
    child = os.fork()
    if not child:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return child


def join(*children: int) -> None:
    """Wait for processes; the benchmark ends where one failed."""
    for child in children:
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit(f"a process of the benchmark ended with {status}")


def measure(plan: Plan) -> dict[str, list[Seconds]]:
    """Return seconds of every round by name."""
    source = fork(lambda: run_source(plan))
    join(fork(lambda: run_living(plan)))
    for number in range(plan.rounds):
        join(fork(lambda number=number: run_spare(plan, number)))  # type: ignore[misc]
    join(source)
    join(fork(lambda: run_save(plan)))
    for _ in range(plan.rounds):
        join(fork(lambda: run_load(plan)))
    figures: dict[str, list[Seconds]] = {}
    for line in plan.seconds.read_text().splitlines():
        name, wall_s, cpu_s = json.loads(line)
        figures.setdefault(name, []).append((wall_s, cpu_s))
    return figures


def report(gib: float, figures: dict[str, list[Seconds]]) -> dict[str, object]:
    """Print the table; returns it as JSON data."""
    walls = {name: [wall_s for wall_s, _ in each] for name, each in figures.items()}
    medians = {name: statistics.median(each) for name, each in walls.items()}
    share = medians[MEMCPY] / medians[LIVING]
    factor = medians[DCP] / medians[SPARE]
    load = os.getloadavg()[0]
    print(
        f"state of {gib:g} GiB, {os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}"
    )
    print(f"{'':16} {'median s':>9} {'min s':>9} {'max s':>9} {'CPU s':>9} {'GB/s':>7}")
    for name, each in walls.items():
        rate = gib * 2**30 / medians[name] / 1e9
        cpu_s = statistics.median(seconds for _, seconds in figures[name])
        print(
            f"{name:16} {medians[name]:9.3f} {min(each):9.3f} {max(each):9.3f} {cpu_s:9.3f} "
            f"{rate:7.2f}"
        )
    print(f"repair of a living rank: {share:.0%} of memcpy (bar {MEMCPY_SHARE_MIN:.0%})")
    print(f"repair of a spare: {factor:.1f} x as fast as DCP (bar {DCP_FACTOR_MIN:g})")
    return {
        "gib": gib,
        "load": load,
        "seconds": figures,
        "memcpy_share": share,
        "dcp_factor": factor,
    }


def main() -> None:
    """Measure, print a table, write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-repair-") as folder:
        plan = Plan(options.gib, options.rounds, create_arena(2), Path(folder))
        table = report(options.gib, measure(plan))
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
