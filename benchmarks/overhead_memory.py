"""How much memory a job takes with recovery, in calm and in a recovery, beside one without.

Memory is the proportional set size: what n processes share counts 1/n in each, so the sum over
all processes of a job counts it once, the transfer buffer too. It is read every 50 ms from
outside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.events import Event, EventReader
from benchmarks.faultbench import free_ports, run_folder, wait_for_job
from benchmarks.jobplan import Fault, JobPlan
from benchmarks.ours import LONG_DEADLINE, start_workers
from benchmarks.overhead_figures import (
    Memory,
    Sample,
    between,
    calm_window,
    first_events,
    name_ranks,
    recovery_windows,
)
from benchmarks.peers import torchrun
from benchmarks.processes import ProcessJob, find_processes

PLAIN, RECOVERED = "benchmarks.overhead_state", "benchmarks.overhead_recovered"
SAMPLE_S = 0.05
CALM_STEP = 3
EXCEPTION_STEP, KILL_STEP, NUM_STEPS = 10, 14, 18
ZYGOTE = b"\0resilience.agent.processes.zygote\0"
AGENTS = (
    b"\0resilience.agent\0",
    ZYGOTE,
    b"\0torch.distributed.run\0",
)
LIMIT_S = 600.0


@dataclasses.dataclass(slots=True, kw_only=True)
class MemoryFigures:
    """One kind of job; sizes are bytes, those of a part at its own peak."""

    name: str
    num_samples: int
    gap_s: float
    """The mean time between two samples: what is shorter may be missed."""
    median: int
    """Of all processes together, in calm."""
    peak: int
    peak_without_spares: int
    agent: int
    ranks: int
    spares: int
    recoveries: dict[str, int] = dataclasses.field(default_factory=dict)
    """The peak of all processes by kind of fault."""


def read_pss(pid: int, kind: str = "Pss") -> int:
    """Return a process's proportional set size, or a kind of it; 0 for one that is gone."""
    try:
        text = Path("/proc", str(pid), "smaps_rollup").read_text("ascii")
    except OSError:
        return 0
    line = next(line for line in text.splitlines() if line.startswith(f"{kind}:"))
    return int(line.split()[1]) << 10


class Sampler:
    """Reads all processes of a run now and then."""

    def __init__(self, run_dir: str, read: Callable[[int], int] = read_pss) -> None:
        self.run_dir = run_dir
        self.read = read
        self.samples: list[Sample] = []

    def look(self) -> None:
        """Take one sample."""
        sizes: dict[bool, dict[int, int]] = {True: {}, False: {}}
        for pid in find_processes(self.run_dir):
            sizes[is_agent(pid)][pid] = self.read(pid)
        self.samples.append(Sample(at_s=time.monotonic(), agent=sizes[True], workers=sizes[False]))


def is_agent(pid: int) -> bool:
    """Tell what starts workers from workers, which have the zygote's command and a session."""
    command, is_leader = b"", False
    with contextlib.suppress(OSError):
        command = Path("/proc", str(pid), "cmdline").read_bytes()
        is_leader = os.getsid(pid) == pid
    is_worker = ZYGOTE in command and is_leader
    return any(name in command for name in AGENTS) and not is_worker


def measure(
    name: str, start: Callable[[JobPlan], ProcessJob], num_ranks: int, faults: Sequence[Fault]
) -> MemoryFigures:
    """Run one job and judge its samples."""
    with run_folder() as folder:
        plan = JobPlan(
            run_dir=folder,
            num_steps=NUM_STEPS if faults else EXCEPTION_STEP,
            faults=tuple(faults),
            num_ranks=num_ranks,
            ports=free_ports(4),
        )
        plan.write()
        sampler = Sampler(folder)
        wait_for_job(start(plan), LIMIT_S, look=sampler.look, every_s=SAMPLE_S)
        reader = EventReader(folder)
        reader.read_new()
    return judge(name, sampler.samples, reader.events, num_ranks)


def judge(
    name: str, samples: Sequence[Sample], events: Sequence[Event], num_ranks: int
) -> MemoryFigures:
    """Turn samples and events into figures."""
    joined_s = first_events(events)
    calm = [
        name_ranks(each, joined_s) for each in between(samples, *calm_window(events, CALM_STEP))
    ]
    if not calm:
        raise RuntimeError(f"{name}: no sample between step {CALM_STEP} and the first fault")
    recoveries = {
        kind: max(
            (name_ranks(each, joined_s).total for each in between(samples, begin_s, end_s)),
            default=0,
        )
        for kind, begin_s, end_s in recovery_windows(events, num_ranks)
    }
    return MemoryFigures(
        name=name,
        num_samples=len(calm),
        gap_s=(samples[-1].at_s - samples[0].at_s) / max(1, len(samples) - 1),
        median=round(statistics.median(each.total for each in calm)),
        peak=max(each.total for each in calm),
        peak_without_spares=max(each.total - each.spares for each in calm),
        **{part: peak_of(calm, part) for part in ("agent", "ranks", "spares")},
        recoveries=recoveries,
    )


def peak_of(sizes: Sequence[Memory], part: str) -> int:
    """Return the most that one part has had."""
    return max(int(getattr(each, part)) for each in sizes)


def measure_both(gib: float, num_ranks: int) -> tuple[MemoryFigures, MemoryFigures]:
    """Measure a job without recovery, and one with it that meets two faults."""
    faults = (
        Fault(kind="exception", rank=1, step=EXCEPTION_STEP),
        Fault(kind="kill", rank=num_ranks - 1, step=KILL_STEP),
    )
    off = measure("off", lambda plan: torchrun(plan, [PLAIN, "--gib", gib]), num_ranks, faults=())
    on = measure(
        "on",
        lambda plan: start_workers(
            plan, [RECOVERED, "--gib", gib], preloaded=["torch"], options=LONG_DEADLINE
        ),
        num_ranks,
        faults,
    )
    return off, on


def ratios(off: MemoryFigures, on: MemoryFigures) -> Mapping[str, float]:
    """Return what the bars are about, each relative to the job without recovery."""
    return {
        "median": on.median / off.median,
        "peak": on.peak / off.peak,
        "peak without spares": on.peak_without_spares / off.peak,
        **{f"recovery: {kind}": peak / off.peak for kind, peak in on.recoveries.items()},
    }
