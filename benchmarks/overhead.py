"""What recovery costs while nothing fails: time of a step, and memory.

    python -m benchmarks.overhead [--pairs 1000] [--parts steps,memory] [--json FILE]

steps: every worker holds two copies of the tiny model, one as torch has it and one under
`resilience.protect`, with DDP and then with FSDP2, and takes a step of each in turn, pair by pair
in changing order; a step lasts from the first rank's begin to the last rank's end. memory:
proportional set sizes with 1 GiB of state per rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import machine, overhead_memory
from benchmarks import overhead_figures as figures
from benchmarks.faultbench import free_ports, run_folder, wait_for_job
from benchmarks.jobplan import NUM_RANKS, JobPlan
from benchmarks.ours import LONG_DEADLINE, PRELOADED, start_workers

PARTS = ("steps", "memory")
LAYOUTS = ("ddp", "fsdp")
WARM_UP = 20
"""Steps of each kind that are not counted; the losses of both have to agree in them."""
RANKS = {"ddp": 2, "fsdp": 4}
"""Workers by layout. On a shared core a wait for all workers lasts as long as their work there."""
LOSS_DIFFERENCE_MAX = 1e-4
PAIR_LIMIT_S = 3.0
START_LIMIT_S = 180.0
MIB = 1 << 20


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=1000, help="steps of each kind")
    parser.add_argument("--gib", type=float, default=1.0, help="state of each rank, for memory")
    parser.add_argument("--memory-ranks", type=int, default=NUM_RANKS)
    parser.add_argument("--parts", type=machine.names_of(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    if min(arguments.pairs, arguments.memory_ranks) < 2:
        parser.error("fewer than 2 pairs or ranks show nothing")
    return arguments


# ---- steps


def compare_steps(layout: str, pairs: int) -> figures.Ratio:
    """Run both copies against each other; return a protected step by one as torch has it."""
    with run_folder() as folder:
        plan = JobPlan(
            run_dir=folder, num_ranks=RANKS[layout], num_steps=pairs, ports=free_ports(4)
        )
        plan.write()
        program = ["benchmarks.overhead_steps", "--layout", layout]
        program += ["--pairs", str(pairs), "--warm-up", str(WARM_UP)]
        options = [*LONG_DEADLINE, "--warm=imports"]
        job = start_workers(plan, program, preloaded=PRELOADED, options=options)
        wait_for_job(job, START_LIMIT_S + pairs * PAIR_LIMIT_S)
        paths = [Path(folder, f"steps-{rank}.json") for rank in range(plan.num_ranks)]
        ranks = [json.loads(path.read_text("utf-8")) for path in paths]
    difference = max(rank["loss_difference"] for rank in ranks)
    if difference > LOSS_DIFFERENCE_MAX:
        raise RuntimeError(f"the losses of both copies differ by {difference}: not the same work")
    plain, ours = (figures.join_spans([rank[name] for rank in ranks]) for name in ("plain", "ours"))
    ratio = figures.judge_pairs(ours, plain)
    step_ms = [f"{1e3 * statistics.median(each):.2f} ms" for each in (plain, ours)]
    verdict = "within" if ratio.median <= figures.STEP_BAR else "ABOVE"
    print(
        f"{layout}: protected / plain step {ratio}, {ratio.num_pairs} pairs, medians "
        f"{' and '.join(reversed(step_ms))}, {verdict} the bar {figures.STEP_BAR}",
        flush=True,
    )
    return ratio


# ---- memory


def render_memory(
    off: overhead_memory.MemoryFigures, on: overhead_memory.MemoryFigures, gib: float, num: int
) -> str:
    """Render both jobs beside each other."""
    found = overhead_memory.ratios(off, on)
    rows = [
        ("all processes, median", off.median, on.median, "median"),
        ("all processes, peak", off.peak, on.peak, "peak"),
        ("without spares, peak", off.peak, on.peak_without_spares, "peak without spares"),
        *((f"{part}, own peak", getattr(off, part), getattr(on, part), "")
          for part in ("agent", "ranks", "spares")),
        *((f"peak in recovery from {kind}", off.peak, peak, f"recovery: {kind}")
          for kind, peak in on.recoveries.items()),
    ]  # fmt: skip
    gaps = " and ".join(f"{1e3 * each.gap_s:.0f} ms" for each in (off, on))
    lines = [
        f"memory: {num} ranks with {gib:g} GiB of state each, MiB of proportional set size",
        f"  {off.num_samples} and {on.num_samples} samples in calm, one each {gaps}",
        "  | | off | on | on/off |",
        "  |---|---|---|---|",
    ]
    for words, left, right, key in rows:
        share = f"{found[key]:.4f}" if key else ""
        lines.append(f"  | {words} | {left / MIB:.0f} | {right / MIB:.0f} | {share} |")
    calm = "within" if found["peak"] <= figures.MEMORY_BAR else "ABOVE"
    worst = max((value for key, value in found.items() if ":" in key), default=float("inf"))
    recovery = "within" if worst <= figures.RECOVERY_MEMORY_BAR else "ABOVE"
    lines.append(
        f"  calm {calm} the bar {figures.MEMORY_BAR}, in recovery {recovery} the bar "
        f"{figures.RECOVERY_MEMORY_BAR}"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure the chosen parts and print what came out."""
    arguments = parse_arguments()
    about = machine.check_load(arguments)
    results: dict[str, Any] = {}
    if "steps" in arguments.parts:
        results["steps"] = {each: compare_steps(each, arguments.pairs) for each in LAYOUTS}
    if "memory" in arguments.parts:
        off, on = overhead_memory.measure_both(arguments.gib, arguments.memory_ranks)
        results["memory"] = {"off": off, "on": on, "ratios": overhead_memory.ratios(off, on)}
        print(render_memory(off, on, arguments.gib, arguments.memory_ranks), flush=True)
    machine.write_json(arguments.json, about, **results)


if __name__ == "__main__":
    main()
