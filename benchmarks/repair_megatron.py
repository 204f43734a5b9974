"""What a recovery of Megatron's takes of time and memory where each rank has much state.

    python -m benchmarks.repair_megatron [--layers 10] [-n 3]

Four workers, tensor ranks in pairs, each pair with a copy. A rank's state are the main parameters
and moments of its own slice, some 100 MiB for each layer. Each run meets exceptions and SIGKILLs
in turn: a survivor keeps its state, and who replaces a killed rank copies that of the other copy.
Seconds count from the fault until every rank has the state and the groups to go on with; those of
groups are of the rank that came last, for which the others have waited. Memory is what a process
has for itself and the state of one rank, read every 50 ms: the states lie in shared memory, which
is there before and after, and of which each process has a larger share while one is missing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks import figures, machine
from benchmarks.events import Event, EventReader
from benchmarks.faultbench import free_ports, run_folder, wait_for_job
from benchmarks.jobplan import NUM_RANKS, Fault, JobPlan
from benchmarks.ours import start_megatron
from benchmarks.overhead_figures import Sample, between, calm_window, recovery_windows
from benchmarks.overhead_memory import SAMPLE_S, Sampler, read_pss

MEMORY_BAR = 1.15
OPENING_BAR_S, REBINDING_BAR_S = 0.06, 0.01
FIRST_STEP, SPACING = 6, 4
LIMIT_S = 1800.0
HIDDEN, FFN = 1024, 4096
BYTES_PER_VALUE = 12
"""A main parameter in float32 and its two moments."""


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=10, help="of the model")
    parser.add_argument("-n", "--num-faults", type=int, default=3, help="faults of each kind")
    machine.add_arguments(parser)
    return parser.parse_args()


def overrides(num_layers: int) -> Sequence[str]:
    """Return what makes the job's model large and its steps short."""
    return (
        f"model.num_layers={num_layers}",
        f"model.hidden_size={HIDDEN}",
        f"model.ffn_hidden_size={FFN}",
        "model.num_heads=8",
        "model.num_kv_heads=8",
        f"model.head_dim={HIDDEN // 8}",
        "data.seq_length=16",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=2",
    )


def run(num_layers: int, num_faults: int) -> tuple[Sequence[Sample], Sequence[Event]]:
    """Run the job through its faults; return what its processes had, and what they told."""
    faults = tuple(
        Fault(
            kind="exception" if number % 2 == 0 else "kill",
            rank=number % NUM_RANKS,
            step=FIRST_STEP + number * SPACING,
        )
        for number in range(2 * num_faults)
    )
    with run_folder() as folder:
        plan = JobPlan(
            run_dir=folder,
            num_steps=FIRST_STEP + len(faults) * SPACING,
            faults=faults,
            ports=free_ports(4),
        )
        plan.write()
        sampler = Sampler(folder, lambda pid: read_pss(pid, "Pss_Anon"))
        job = start_megatron(plan, overrides(num_layers))
        wait_for_job(job, LIMIT_S, look=sampler.look, every_s=SAMPLE_S)
        reader = EventReader(folder)
        reader.read_new()
    return sampler.samples, reader.events


def recovery_seconds(events: Sequence[Event], kind: str) -> Iterator[float]:
    """Yield how long each fault of a kind kept the last rank from going on."""
    for fault in events:
        if fault.word != "faulted" or fault.values["kind"] != kind:
            continue
        restored = sorted(
            each.at_s for each in events if each.word == "restored" and each.at_s > fault.at_s
        )
        yield restored[NUM_RANKS - 1] - fault.at_s


def group_seconds(events: Sequence[Event], name: str) -> list[float]:
    """Return how long each generation's groups took the rank that waited least."""
    found: dict[int, float] = {}
    for each in events:
        if each.word == "grouped":
            generation, seconds = int(each.values["generation"]), float(each.values[name])
            found[generation] = min(seconds, found.get(generation, seconds))
    return list(found.values())


def peaks(samples: Sequence[Sample], events: Sequence[Event]) -> tuple[int, dict[str, list[int]]]:
    """Return what the largest process had for itself in calm, and by kind of fault."""
    window = calm_window(events, FIRST_STEP - 3)
    calm = [max(sample.workers.values()) for sample in between(samples, *window)]
    most: dict[str, list[int]] = {}
    for kind, begin_s, end_s in recovery_windows(events, NUM_RANKS):
        sizes = (max(each.workers.values()) for each in between(samples, begin_s, end_s))
        most.setdefault(kind, []).append(max(sizes))
    return max(calm), most


def main() -> None:
    """Measure, and print a line for each figure."""
    arguments = parse_arguments()
    machine.check_load(arguments)
    samples, events = run(arguments.layers, arguments.num_faults)
    num_values = arguments.layers * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) / 2
    state = num_values * BYTES_PER_VALUE
    print(f"state of a rank: {state / (1 << 30):.2f} GiB")
    print("| what | median (smallest to largest) | bar |")
    print("|---|---|---|")
    line = partial("| {} | {} | {} |".format)
    for kind in ("exception", "kill"):
        seconds = list(recovery_seconds(events, kind))
        print(line(f"{kind}: all ranks have their state, s", figures.spread(seconds), ""))
    for name, bar_s in (("opening_s", OPENING_BAR_S), ("rebinding_s", REBINDING_BAR_S)):
        found = group_seconds(events, name)
        digits = f"{statistics.median(found):.4f} ({min(found):.4f}-{max(found):.4f})"
        print(line(f"{name.removesuffix('_s')} of groups, s", digits, bar_s))
    calm, most = peaks(samples, events)
    for kind, found in most.items():
        ratios = [(each + state) / (calm + state) for each in found]
        words = f"{kind}: largest process / largest in calm ({(calm + state) / (1 << 30):.2f} GiB)"
        print(line(words, figures.spread(ratios), MEMORY_BAR))


if __name__ == "__main__":
    main()
