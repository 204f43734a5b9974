"""What recovery costs a step of Megatron's while nothing fails.

    python -m benchmarks.overhead_megatron [--pairs 1000] [--layouts tensor,sharded] [--work 1]

Every rank holds two copies of a small model: one in a plain loop, with Megatron's own schedule,
reductions, optimizer's step and sends, one under recovery. It takes a step of each in turn, pair by
pair in changing order, each after a barrier. A step lasts from the first rank's begin to the last
rank's end. The plain loop sums no loss over the ranks; the losses are compared outside of the step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import machine
from benchmarks import overhead_figures as figures
from benchmarks.faultbench import free_ports, run_folder, wait_for_job
from benchmarks.jobplan import MICRO_BATCH, NUM_RANKS, JobPlan
from benchmarks.ours import LONG_DEADLINE, MEGATRON_PRELOADED, start_workers
from benchmarks.recovery_peers import megatron_job

LAYOUTS = {
    "tensor": ("trainer.tensor_parallel=2",),
    "pipeline": (
        "trainer.tensor_parallel=1",
        "trainer.pipeline_parallel=2",
        "model.num_layers=6",
    ),
    "sharded": ("trainer.tensor_parallel=1",),
}
"""Four ranks with two copies: pairs of tensor ranks, of stages, and of shards."""
SAMPLES = {"tensor": MICRO_BATCH * NUM_RANKS // 2, "pipeline": 16, "sharded": 8}
"""Samples of a step with `--work 1`."""
WARM_UP = 10
START_LIMIT_S = 180.0
PAIR_LIMIT_S = 5.0


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=1000, help="steps of each kind")
    parser.add_argument("--layouts", type=machine.names_of(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--work", type=int, default=1, help="times as many micro batches a step")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error("fewer than 2 pairs show nothing")
    if arguments.work < 1:
        parser.error("--work has to be 1 or more")
    return arguments


def measure(layout: str, pairs: int, work: int) -> tuple[figures.Ratio, dict[str, float]]:
    """Run both copies against each other; return their ratio, and a step's milliseconds of each."""
    with run_folder() as folder:
        plan = JobPlan(run_dir=folder, num_steps=pairs, ports=free_ports(4))
        plan.write()
        samples = f"trainer.global_batch_size={work * SAMPLES[layout]}"
        job = megatron_job.write_job(plan, *LAYOUTS[layout], samples)
        stages = getattr(job.trainer, "pipeline_parallel", 1)
        program = ["benchmarks.recovery_peers.megatron_contest", str(pairs), str(WARM_UP)]
        options = ["--shards=2", f"--stages={stages}", *LONG_DEADLINE]
        started = start_workers(plan, program, preloaded=MEGATRON_PRELOADED, options=options)
        wait_for_job(started, START_LIMIT_S + pairs * PAIR_LIMIT_S)
        paths = [Path(folder, f"steps-{rank}.json") for rank in range(plan.num_ranks)]
        ranks = [json.loads(path.read_text("utf-8")) for path in paths]
    for rank in ranks:
        if rank["losses"]["plain"] != rank["losses"]["ours"]:
            raise RuntimeError(f"{layout}: the losses of both copies differ: not the same work")
    spans = {name: figures.join_spans([rank[name] for rank in ranks]) for name in ("plain", "ours")}
    step_ms = {name: 1e3 * sorted(each)[len(each) // 2] for name, each in spans.items()}
    return figures.judge_pairs(spans["ours"], spans["plain"]), step_ms


def main() -> None:
    """Measure the chosen layouts and print a line for each."""
    arguments = parse_arguments()
    machine.check_load(arguments)
    print("| layout | with recovery / plain | of sums | pairs | plain ms | ours ms | bar |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for layout in arguments.layouts:
        ratio, step_ms = measure(layout, arguments.pairs, arguments.work)
        verdict = "within" if ratio.median <= figures.STEP_BAR else "ABOVE"
        print(
            f"| {layout} | {ratio} | {ratio.of_sums:.4f} | {ratio.num_pairs} | "
            f"{step_ms['plain']:.1f} | {step_ms['ours']:.1f} | {verdict} {figures.STEP_BAR} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
