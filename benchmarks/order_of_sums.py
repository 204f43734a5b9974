"""What one order of sums costs: `trainer.order_of_sums=fixed` beside `size`.

    python -m benchmarks.order_of_sums [--pairs 100] [--mib 8]

Four ranks on this machine, over gloo. Reduction: one tensor of --mib MiB through the tree beside
`dist.all_reduce`, with one term a rank. Step: each rank holds the model of the tiny recipe twice,
and takes a step of each in turn, pair by pair in changing order, each after a barrier; a step lasts
from the first rank's begin to the last rank's end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import machine
from benchmarks import overhead_figures as figures
from benchmarks.faultbench import free_ports
from launcher.composition.compose import resolve
from launcher.job import Job
from recipes_training.group import WorkerGroup
from recipes_training.torch.trainer import TorchTrainer
from resilience.comm.tree_reducer import TreeReducer
from resilience.state.layout import make_layout

NUM_RANKS = 4
RECIPE = "llama/llama3_tiny_checkpointless"
OVERRIDES = (
    "trainer.num_nodes=1",
    f"trainer.num_devices={NUM_RANKS}",
    "resilience.faults=null",
    "resilience.tiered=null",
)
WARM_UP = 5
REDUCTION_BAR, STEP_BAR = 2.5, 1.10
Spans = Mapping[str, list[tuple[float, float]]]


class Silent:
    """A watch that hears nothing and lets no fault strike."""

    places = ()

    def requests(self) -> int:
        """Ask for nothing."""
        return 0

    def reach(self, place: str) -> None:
        """Do nothing."""

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Do nothing."""

    def backward(self, micro_batch: int) -> None:
        """Do nothing."""


def take_turns(kinds: Mapping[str, Callable[[], object]], pairs: int) -> Spans:
    """Do each of two things in turn, as often as there are pairs; return when each was done."""
    names = list(kinds)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for pair in range(WARM_UP + pairs):
        for name in names if pair % 2 else reversed(names):
            dist.barrier()
            begin_s = time.monotonic()
            kinds[name]()
            if pair >= WARM_UP:
                found[name].append((begin_s, time.monotonic()))
    return found


def reductions(mib: int) -> Mapping[str, Callable[[], object]]:
    """Return a sum by the tree and one by torch, of as many values."""
    module = nn.Linear((mib << 20) // 4, 1, bias=False)
    tree = TreeReducer(module, num_terms=NUM_RANKS)
    flat = torch.zeros(module.weight.numel())

    def reduce() -> None:
        with tree.micro_batch(is_last=True):
            pass

    return {"fixed": reduce, "size": partial(dist.all_reduce, flat)}


def steps(rank: int) -> Mapping[str, Callable[[], object]]:
    """Return a step under either order."""
    group = WorkerGroup(
        rank=rank,
        layout=make_layout(nodes=["node-0"], num_local_ranks=NUM_RANKS),
        generation=0,
        node="node-0",
        device=torch.device("cpu"),
        store=dist.distributed_c10d._get_default_store(),  # noqa: SLF001
    )

    def make(order: str) -> Callable[[], object]:
        job = resolve(RECIPE, [*OVERRIDES, f"trainer.order_of_sums={order}"])
        trainer = TorchTrainer(job, Silent(), is_restartable=True)
        trainer.take_groups(group)
        trainer.fill()
        rows = draw(job)

        def take() -> None:
            trainer.stepper.compute(rows, step=0)
            trainer.stepper.update(1e-4)

        return take

    return {order: make(order) for order in ("fixed", "size")}


def draw(job: Job) -> list[torch.Tensor]:
    """Return one rank's micro batches of a step."""
    trainer = job.trainer
    shape = (trainer.micro_batch_size, job.data.seq_length + 1)
    num = trainer.num_micro_batches // trainer.world_size
    return [torch.randint(job.model.vocab_size, shape) for _ in range(num)]


def run_rank(rank: int, port: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Measure both as one rank, and write what was seen."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_RANKS)
    found = {
        "reduction": take_turns(reductions(arguments.mib), arguments.pairs),
        "step": take_turns(steps(rank), arguments.pairs),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()


def measure(arguments: argparse.Namespace) -> list[dict[str, Spans]]:
    """Run all ranks; return what each has seen."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = []
        for rank in range(NUM_RANKS):
            if not (pid := os.fork()):
                try:
                    run_rank(rank, port, arguments, folder)
                except BaseException as error:  # noqa: BLE001 - the fork ends here
                    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            raise SystemExit("a rank has failed")
        paths = [folder / f"{rank}.json" for rank in range(NUM_RANKS)]
        return [json.loads(path.read_text("utf-8")) for path in paths]


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--mib", type=int, default=8, help="of the reduced tensor")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    machine.check_load(arguments)
    ranks = measure(arguments)
    print("| what | fixed / size | pairs | size ms | fixed ms | bar |")
    print("|---|---|---|---|---|---|")
    for what, bar in (("reduction", REDUCTION_BAR), ("step", STEP_BAR)):
        spans = {
            name: figures.join_spans([rank[what][name] for rank in ranks])
            for name in ("fixed", "size")
        }
        ratio = figures.judge_pairs(spans["fixed"], spans["size"])
        size_ms, fixed_ms = (
            1e3 * sorted(spans[name])[len(spans[name]) // 2] for name in ("size", "fixed")
        )
        verdict = "within" if ratio.median <= bar else "ABOVE"
        print(
            f"| {what} | {ratio} | {ratio.num_pairs} | {size_ms:.1f} | {fixed_ms:.1f} "
            f"| {verdict} {bar} |"
        )


if __name__ == "__main__":
    main()
