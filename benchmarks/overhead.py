"""What recovery costs while nothing fails: time of a step, and memory.

    python -m benchmarks.overhead [--pairs 1000] [--parts steps,memory] [--json FILE]

steps: every worker holds two copies of the tiny model, one under plain DDP and one under
recovery, and takes a step of each in turn, pair by pair in changing order; a step lasts from the
first rank's begin to the last rank's end. memory: proportional set sizes with 1 GiB of state per
rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, overhead_memory
from benchmarks import overhead_figures as figures
from benchmarks.faultbench import free_ports, run_folder, wait_for_job
from benchmarks.jobplan import NUM_RANKS, JobPlan
from benchmarks.ours import LONG_DEADLINE, PRELOADED, start_workers

PARTS = ("steps", "memory")
WARM_UP = 20
"""Steps of each kind that are not counted; the losses of both have to agree in them."""
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
    parser.add_argument("--keep", type=Path, help="copy the moments of all steps here")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    if min(arguments.pairs, arguments.memory_ranks) < 2:
        parser.error("fewer than 2 pairs or ranks show nothing")
    return arguments


# ---- steps


def run_steps(pairs: int, *, keep: Path | None) -> list[dict[str, Any]]:
    """Run both copies against each other; return what each rank wrote."""
    with run_folder(keep) as folder:
        plan = JobPlan(run_dir=folder, num_steps=pairs, ports=free_ports(4))
        plan.write()
        program = ["benchmarks.overhead_steps", "--pairs", str(pairs), "--warm-up", str(WARM_UP)]
        job = start_workers(plan, program, preloaded=PRELOADED, options=LONG_DEADLINE)
        wait_for_job(job, START_LIMIT_S + pairs * PAIR_LIMIT_S)
        paths = [Path(folder, f"steps-{rank}.json") for rank in range(plan.num_ranks)]
        return [json.loads(path.read_text("utf-8")) for path in paths]


def judge_steps(ranks: Sequence[Mapping[str, Any]], cores: int) -> dict[str, Any]:
    """Turn what ranks wrote into figures."""
    difference = max(rank["loss_difference"] for rank in ranks)
    if difference > LOSS_DIFFERENCE_MAX:
        raise RuntimeError(f"the losses of both copies differ by {difference}: not the same work")
    plain, ours = [rank["plain"] for rank in ranks], [rank["ours"] for rank in ranks]
    spans = {"plain": figures.join_spans(plain), "ours": figures.join_spans(ours)}
    cpu = {
        name: [sum(step) for step in zip(*(rank[f"{name}_cpu_s"] for rank in ranks), strict=True)]
        for name in spans
    }
    wall_s = ranks[0]["wall_s"]
    links = [rank["background_cpu_s"][0] for rank in ranks]
    agent, zygote, spares = ranks[0]["background_cpu_s"][1:]
    share = (sum(links) + agent + zygote + spares) / wall_s / cores
    ratio = figures.judge_pairs(spans["ours"], spans["plain"])
    return {
        "ratio": ratio,
        "cpu_ratio": figures.judge_pairs(cpu["ours"], cpu["plain"]),
        "step_ms": {name: 1e3 * sorted(each)[len(each) // 2] for name, each in spans.items()},
        "plain_parts_s": figures.median_parts(plain, figures.PLAIN_PARTS),
        "ours_parts_s": figures.median_parts(ours, figures.OURS_PARTS),
        "gate_last_s": figures.last_to_come(ours, figures.OURS_PARTS, "gate"),
        "reducer_last_s": figures.last_to_come(ours, figures.OURS_PARTS, "reducer"),
        "background_cpu_ms_per_s": {
            name: 1e3 * seconds / wall_s
            for name, seconds in (
                ("links", sum(links)),
                ("agent", agent),
                ("zygote", zygote),
                ("spares", spares),
            )
        },
        "with_background": ratio.median / (1 - share),
        "loss_difference": difference,
    }


def render_steps(result: Mapping[str, Any]) -> str:
    """Render the figures of a step."""
    verdict = "within" if result["with_background"] <= figures.STEP_BAR else "ABOVE"
    ratio, step_ms = result["ratio"], result["step_ms"]
    background = result["background_cpu_ms_per_s"]
    lines = [
        f"step with recovery / DDP: {ratio}, of sums {ratio.of_sums:.4f}",
        f"  {ratio.num_pairs} pairs, {step_ms['plain']:.2f} ms plain, {step_ms['ours']:.2f} ours",
        f"  processor time of a step, ours / DDP: {result['cpu_ratio']}",
        "  beside the steps, processor ms per s: "
        + ", ".join(f"{name} {value:.2f}" for name, value in background.items())
        + f"; with these {result['with_background']:.4f}, {verdict} the bar {figures.STEP_BAR}",
        "  | part, median ms of a rank | DDP | ours |",
        "  |---|---|---|",
    ]
    plain, ours = result["plain_parts_s"], result["ours_parts_s"]
    for name in figures.OURS_PARTS:
        left = f"{1e3 * plain[name]:.3f}" if name in plain else "-"
        lines.append(f"  | {name} | {left} | {1e3 * ours[name]:.3f} |")
    lines.append(
        f"  for the rank that comes last: gate {1e3 * result['gate_last_s']:.3f} ms, "
        f"reducer after backward {1e3 * result['reducer_last_s']:.3f} ms"
    )
    lines.append(f"  losses of the first {WARM_UP} steps differ by {result['loss_difference']:.1e}")
    return "\n".join(lines)


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
    cores = int(str(about["cores"]))
    if "steps" in arguments.parts:
        results["steps"] = judge_steps(run_steps(arguments.pairs, keep=arguments.keep), cores)
        print(render_steps(results["steps"]), flush=True)
    if "memory" in arguments.parts:
        off, on = overhead_memory.measure_both(arguments.gib, arguments.memory_ranks)
        results["memory"] = {"off": off, "on": on, "ratios": overhead_memory.ratios(off, on)}
        print(render_memory(off, on, arguments.gib, arguments.memory_ranks), flush=True)
    machine.write_json(arguments.json, about, **results)


if __name__ == "__main__":
    main()
