"""What it costs to give a rank its state back, beside a memcpy and a load from a checkpoint.

Two processes of one node with a state of --gib GiB each (parameters and AdamW's
moments). Measured in the receiving process, medians of --rounds:

- memcpy: one thread copies the state's tensors between ordinary pages that are there.
- repair, living: both processes live and have all their memory; checksums included.
- repair, spare: the receiver was just forked, has touched its memory and mapped the
  node's; the time to take the dead rank's place in shared memory is part of it.
- DCP load: torch.distributed.checkpoint reads the same state from /dev/shm into
  tensors that were touched.

Repairs go the way of states in shared memory (one copy), the way of the transfer buffer (the
ring), and that between nodes (messages over gloo, here by the loopback device). The bars are
for the first. Memory is the sum of both processes' proportional
set sizes with the states in shared memory and mapped by both, over that before.

Starting processes, importing, building the model and meeting in a process group
are in none of them: whatever way the state takes, they are needed. CPU seconds are
those of the receiving process, all threads: on a busy machine they say more than the clock.
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

from resilience.state.digest import digest_state
from resilience.state.move import run_transfers
from resilience.state.shared import SharedState
from resilience.state.state_files import create_state_files
from resilience.state.torch_state import TorchState, materialise
from resilience.state.transfer_buffer import TransferBuffer, create_transfer_buffer

ROW = 1024
BYTES_PER_VALUE = 12
"""A float32 parameter and its two moments."""
TIMEOUT = timedelta(minutes=2)
SHARED, RING, MESSAGES = "shared", "ring", "messages"
MEMCPY, LIVING, SPARE, DCP = "memcpy", "repair, living", "repair, spare", "DCP load"
ADOPT, PSS_BEFORE, PSS_AFTER = "adopt, spare", "bytes before", "bytes after"
MEMORY_FACTOR_MAX = 1.02
MEMCPY_SHARE_MIN, DCP_FACTOR_MIN = 0.6, 5.0
Seconds = tuple[float, float]


@dataclass(frozen=True)
class Memory:
    """What a process has of the node's shared memory."""

    transfer_buffer: TransferBuffer | None
    shared: SharedState | None

    def adopt(self, state: TorchState, rank: int, *, is_overwritten: bool = False) -> None:
        """Let the state live in the rank's place, on the way that has places."""
        if self.shared is None:
            return
        if not self.shared.adopt(state, rank, is_overwritten=is_overwritten):
            raise SystemExit("the state found no room in shared memory")


@dataclass(frozen=True)
class Plan:
    """What all processes of the benchmark know."""

    gib: float
    rounds: int
    transfer_buffer: int
    places: list[int]
    folder: Path

    def open_group(self, rank: int, name: str) -> ProcessGroup:
        """Return a group of both ranks, whose connections are up."""
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(self.folder / name), 2
        )
        group = cast(ProcessGroup, ProcessGroupGloo(store, rank, 2, TIMEOUT))
        group.barrier().wait()
        return group

    def open_memory(self, way: str) -> Memory:
        """Map what the way needs; places are mapped as far as they have memory."""
        if way == MESSAGES:
            return Memory(None, None)
        transfer_buffer = TransferBuffer(self.transfer_buffer, 2)
        transfer_buffer.touch()
        if way == RING:
            return Memory(transfer_buffer, None)
        shared = SharedState(self.places)
        shared.prepare()
        return Memory(transfer_buffer, shared)

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
    """Return the seconds that a call takes, by the clock and of this process's CPU."""
    began, began_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - began_cpu


def repair(state: TorchState, rank: int, group: ProcessGroup, memory: Memory) -> Seconds:
    """Move the state from rank 0 to rank 1."""
    group.barrier().wait()
    return timed(
        lambda: run_transfers(
            [(0, 1, memory.transfer_buffer is not None)],
            view=state,
            rank=rank,
            group=group,
            transfer_buffer=memory.transfer_buffer,
            local_ranks=[0, 1],
            shared=memory.shared,
        )
    )


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy with one thread."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def settle(plan: Plan, state: TorchState, rank: int, group: ProcessGroup, memory: Memory) -> None:
    """Bring a living rank's state where it stays, and map the other's; note memory of both."""
    group.barrier().wait()
    before = read_pss()
    group.barrier().wait()
    memory.adopt(state, rank)
    group.barrier().wait()
    if memory.shared is not None:
        memory.shared.prepare()
        group.barrier().wait()
        plan.note(PSS_BEFORE, (before, 0))
        plan.note(PSS_AFTER, (read_pss(), 0))
    group.barrier().wait()


def read_pss() -> int:
    """Return this process's share of the memory that it has mapped, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith("Pss:")) << 10


def run_source(plan: Plan, way: str) -> None:
    """Be the rank that has the state, for the living rank and then for each spare."""
    state, memory = make_state(plan.gib, 1.0), plan.open_memory(way)
    (plan.folder / "digest").write_text(digest_state(state))
    group = plan.open_group(0, f"living-{way}")
    settle(plan, state, 0, group, memory)
    for _ in range(plan.rounds + 1):
        repair(state, 0, group, memory)
    for number in range(plan.rounds):
        repair(state, 0, plan.open_group(0, f"spare-{way}-{number}"), memory)


def run_living(plan: Plan, way: str) -> None:
    """Be the rank that is repaired again and again; the first round warms up."""
    state, memory = make_state(plan.gib, 0.0), plan.open_memory(way)
    group = plan.open_group(1, f"living-{way}")
    settle(plan, state, 1, group, memory)
    targets = [each.tensor.clone() for each in state.tensors()]
    sources = [each.clone() for each in targets]
    for number in range(plan.rounds + 1):
        memcpy_s = timed(lambda: copy_all(targets, sources))
        for each in state.tensors():
            each.tensor.fill_(number)
        repair_s = repair(state, 1, group, memory)
        if number:
            plan.note(MEMCPY, memcpy_s)
            plan.note(f"{LIVING}, {way}", repair_s)
        check(plan, state)


def run_spare(plan: Plan, way: str, number: int) -> None:
    """Be a process that was kept warm and takes a dead rank's place."""
    state, memory = make_state(plan.gib, 0.0), plan.open_memory(way)
    group = plan.open_group(1, f"spare-{way}-{number}")
    adopt_s = timed(lambda: memory.adopt(state, 1, is_overwritten=True))
    for each in state.tensors():
        each.tensor.fill_(number + 2)
    repair_s = repair(state, 1, group, memory)
    if memory.shared is not None:
        plan.note(ADOPT, adopt_s)
        memory.shared.prepare()
    plan.note(f"{SPARE}, {way}", (adopt_s[0] + repair_s[0], adopt_s[1] + repair_s[1]))
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
    for way in (SHARED, RING, MESSAGES):
        source = fork(lambda way=way: run_source(plan, way))  # type: ignore[misc]
        join(fork(lambda way=way: run_living(plan, way)))  # type: ignore[misc]
        for number in range(plan.rounds):
            join(fork(lambda way=way, number=number: run_spare(plan, way, number)))  # type: ignore[misc]
        join(source)
    join(fork(lambda: run_save(plan)))
    for _ in range(plan.rounds):
        join(fork(lambda: run_load(plan)))
    figures: dict[str, list[Seconds]] = {}
    for line in plan.seconds.read_text().splitlines():
        name, wall_s, cpu_s = json.loads(line)
        figures.setdefault(name, []).append((wall_s, cpu_s))
    return figures


def report(gib: float, figures: dict[str, list[Seconds]], load: float) -> dict[str, object]:
    """Print the table; returns it as JSON data."""
    before, after = (sum(n for n, _ in figures.pop(name)) for name in (PSS_BEFORE, PSS_AFTER))
    walls = {name: [wall_s for wall_s, _ in each] for name, each in figures.items()}
    medians = {name: statistics.median(each) for name, each in walls.items()}
    print(
        f"state of {gib:g} GiB, {os.cpu_count()} cores, load {load:.1f} at the begin, "
        f"{os.getloadavg()[0]:.1f} at the end, torch {torch.__version__}"
    )
    print(f"{'':24} {'median s':>9} {'min s':>9} {'max s':>9} {'CPU s':>9} {'GB/s':>7}")
    for name, each in sorted(walls.items()):
        rate = gib * 2**30 / medians[name] / 1e9
        cpu_s = statistics.median(seconds for _, seconds in figures[name])
        print(
            f"{name:24} {medians[name]:9.3f} {min(each):9.3f} {max(each):9.3f} {cpu_s:9.3f} "
            f"{rate:7.2f}"
        )
    shares = {way: medians[MEMCPY] / medians[f"{LIVING}, {way}"] for way in (SHARED, RING)}
    factors = {way: medians[DCP] / medians[f"{SPARE}, {way}"] for way in (SHARED, RING)}
    for way in (SHARED, RING):
        print(
            f"{way}: repair of a living rank at {shares[way]:.0%} of memcpy "
            f"(bar {MEMCPY_SHARE_MIN:.0%}), of a spare {factors[way]:.1f} x as fast as DCP "
            f"(bar {DCP_FACTOR_MIN:g})"
        )
    print(f"memory with shared states: {after / before:.3f} x (bar {MEMORY_FACTOR_MAX:g})")
    return {
        "gib": gib,
        "load": [load, os.getloadavg()[0]],
        "seconds": figures,
        "memcpy_share": shares,
        "dcp_factor": factors,
        "memory_factor": after / before,
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
        load = os.getloadavg()[0]
        places = create_state_files(2)
        plan = Plan(options.gib, options.rounds, create_transfer_buffer(2), places, Path(folder))
        table = report(options.gib, measure(plan), load)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
