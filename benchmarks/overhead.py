"""What recovery costs while nothing fails: time of a step, memory, and nothing at all when off.

    python -m benchmarks.overhead [--pairs 1000] [--parts steps,buckets,off,memory] [--json FILE]

steps: every worker holds two copies of the tiny model, one under plain DDP and one under
recovery, and takes a step of each in turn, pair by pair in changing order; a step lasts from the
first rank's begin to the last rank's end. buckets: the same for a model whose gradients fill
several buckets. off: what a worker of a real job without the feature imports, starts and sends.
memory: proportional set sizes with 1 GiB of state per rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, overhead_memory
from benchmarks import overhead_figures as figures
from benchmarks.faultbench import free_ports, run_folder
from benchmarks.jobplan import NUM_RANKS, JobPlan
from benchmarks.overhead_jobs import agent_job, plain_agent_job, wait_for_job

PARTS = ("steps", "buckets", "off", "memory")
WARM_UP = {"tiny": 20, "wide": 6}
"""Steps of each kind that are not counted; the losses of both have to agree in them."""
LOSS_DIFFERENCE_MAX = 1e-4
PAIR_LIMIT_S = 3.0
START_LIMIT_S = 180.0
RECIPE = "llama/llama3_tiny_pretrain"
OFF_STEPS = (2, 5)
NUM_OFF_RANKS = 2
FOREIGN_WHEN_OFF = (
    "resilience.checkpointless",
    "resilience.comm.gate",
    "resilience.inprocess.block",
    "resilience.tiered",
)
"""What recovery is made of; the loop, which is one for all jobs, imports the rest."""
THREADS_WHEN_OFF = {"MainThread", "agent-link"}
"""The second may wait for the agent's word."""
NUM_OFF_BUCKETS = 2
"""Of the recipe's model; a step reduces these, and the loss with the wish to stop."""
MIB = 1 << 20


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=1000, help="steps of each kind, tiny model")
    parser.add_argument("--bucket-pairs", type=int, default=60, help="the same, several buckets")
    parser.add_argument(
        "--bucket-view",
        action="store_true",
        help="let DDP keep gradients in its buckets, as the trainer does; not its default",
    )
    parser.add_argument("--gib", type=float, default=1.0, help="state of each rank, for memory")
    parser.add_argument("--memory-ranks", type=int, default=NUM_RANKS)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--keep", type=Path, help="copy the moments of all steps here")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"no parts {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if min(arguments.pairs, arguments.bucket_pairs, arguments.memory_ranks) < 2:
        parser.error("fewer than 2 pairs or ranks show nothing")
    return arguments


# ---- steps


def run_steps(
    work: str, pairs: int, *, keep: Path | None, is_bucket_view: bool
) -> list[dict[str, Any]]:
    """Run both copies against each other; return what each rank wrote."""
    with run_folder(keep) as folder:
        plan = JobPlan(run_dir=folder, num_steps=pairs, ports=free_ports(4))
        plan.write()
        program = ["benchmarks.overhead_steps", "--work", work]
        program += ["--pairs", str(pairs), "--warm-up", str(WARM_UP[work])]
        program += ["--bucket-view"] * is_bucket_view
        preload = ["torch", "transformers", "benchmarks.recovery_peers.job"]
        wait_for_job(agent_job(plan, program, preload), START_LIMIT_S + pairs * PAIR_LIMIT_S)
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
        "overlap": {
            name: figures.judge_overlap([row for rank in ranks for row in rank[f"{name}_overlap"]])
            for name in ("plain", "ours")
        },
    }


def render_steps(work: str, result: Mapping[str, Any]) -> str:
    """Render the figures of one model."""
    verdict = "within" if result["with_background"] <= figures.STEP_BAR else "ABOVE"
    ratio, step_ms = result["ratio"], result["step_ms"]
    background = result["background_cpu_ms_per_s"]
    lines = [
        f"{work}: step with recovery / DDP: {ratio}, of sums {ratio.of_sums:.4f}",
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
    for name, each in result["overlap"].items():
        sent = " ".join(f"{value:.1f}" for value in each.sent_ms)
        done = "" if each.num_done is None else f", {each.num_done:.1f} done by then"
        lines.append(
            f"  {name}: gradients in after {each.backward_ms:.1f} ms, {each.num_buckets} buckets "
            f"sent at {sent} ms{done}"
        )
    lines.append(
        f"  losses of the first {WARM_UP[work]} steps differ by {result['loss_difference']:.1e}"
    )
    return "\n".join(lines)


# ---- off


def check_off() -> dict[str, Any]:
    """Run a job without recovery for a few steps, twice; return what it met of recovery."""
    met = [run_off(num_steps) for num_steps in OFF_STEPS]
    return judge_off(
        met[0], met[1], num_steps=OFF_STEPS[1] - OFF_STEPS[0], num_buckets=NUM_OFF_BUCKETS
    )


def run_off(num_steps: int) -> list[dict[str, Any]]:
    """Run the trainer under a node agent, as any cluster would without the feature."""
    from launcher.composition.compose import resolve

    overrides = [
        "trainer.num_nodes=1",
        f"trainer.num_devices={NUM_OFF_RANKS}",
        f"trainer.max_steps={num_steps}",
        "trainer.optimizer.warmup_steps=1",
        "trainer.save_checkpoint=false",
        "data.max_bytes=100000",
        "resilience.tiered=null",
    ]
    with run_folder() as folder:
        job = resolve(RECIPE, overrides)
        assert job.resilience.checkpointless is None
        path = Path(folder, "job.json")
        path.write_text(job.to_json(), "utf-8")
        plan = JobPlan(
            run_dir=folder, num_steps=num_steps, num_ranks=NUM_OFF_RANKS, ports=free_ports(4)
        )
        plan.write()
        program = ["benchmarks.overhead_off", f"--job={path}", f"--run-dir={folder}"]
        wait_for_job(plain_agent_job(plan, [*program, "--node-name=node-0"]), START_LIMIT_S)
        paths = [Path(folder, f"off-{rank}.json") for rank in range(NUM_OFF_RANKS)]
        return [json.loads(path.read_text("utf-8")) for path in paths]


def judge_off(
    short: Sequence[Mapping[str, Any]],
    long: Sequence[Mapping[str, Any]],
    *,
    num_steps: int,
    num_buckets: int,
) -> dict[str, Any]:
    """Judge two runs whose lengths differ by `num_steps`, each by all its ranks."""
    met = [*short, *long]
    per_step = [
        {
            name: (after["collectives"][name] - before["collectives"].get(name, 0)) / num_steps
            for name in after["collectives"]
        }
        for before, after in zip(short, long, strict=True)
    ]
    kept = [{name: number for name, number in each.items() if number} for each in per_step]
    modules = {
        name for each in met for name in each["modules"] if name.startswith(FOREIGN_WHEN_OFF)
    }
    threads = {name for each in met for name in each["threads"]}
    return {
        "foreign_modules": sorted(modules),
        "threads": sorted(threads),
        "collectives_per_step": kept,
        "is_clean": not modules
        and threads <= THREADS_WHEN_OFF
        and all(each == {"c10d.allreduce_.default": num_buckets + 1} for each in kept),
    }


def render_off(result: Mapping[str, Any]) -> str:
    """Render what a worker without the feature met."""
    verdict = "nothing of recovery" if result["is_clean"] else "SOMETHING OF RECOVERY"
    return (
        f"off: {verdict}; its modules {', '.join(result['foreign_modules']) or 'none'}; "
        f"threads {', '.join(result['threads'])}; collectives of a step "
        f"{result['collectives_per_step'][0]}"
    )


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


def plain_values(value: object) -> object:
    """Turn dataclasses into what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def main() -> None:
    """Measure the chosen parts and print what came out."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    about = machine.check_load(arguments)
    results: dict[str, Any] = {"machine": about}
    cores = int(str(about["cores"]))
    for part, work, pairs in (
        ("steps", "tiny", arguments.pairs),
        ("buckets", "wide", arguments.bucket_pairs),
    ):
        if part in arguments.parts:
            ranks = run_steps(
                work, pairs, keep=arguments.keep, is_bucket_view=arguments.bucket_view
            )
            results[part] = judge_steps(ranks, cores)
            print(render_steps(work, results[part]), flush=True)
    if "off" in arguments.parts:
        results["off"] = check_off()
        print(render_off(results["off"]), flush=True)
    if "memory" in arguments.parts:
        off, on = overhead_memory.measure_both(arguments.gib, arguments.memory_ranks)
        results["memory"] = {"off": off, "on": on, "ratios": overhead_memory.ratios(off, on)}
        print(render_memory(off, on, arguments.gib, arguments.memory_ranks), flush=True)
    if arguments.json:
        text = json.dumps(results, indent=1, default=plain_values)
        arguments.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
