"""What a step costs more where a run may change its size and does not.

    python -m benchmarks.elastic_unchanged [--windows 20] [--seconds 5] [--before TREE]

Two runs of llama3_tiny_elastic, one node of two workers each, at the same time on this machine:
one as it is, the other with `resilience.elastic=null`. Whatever else the machine does slows both.
Each has a core, and they change cores after each window. A figure is the ratio of the two medians
of a step in two windows, so that each run had each core. Two runs without elasticity come first:
how much two of one kind differ. With `--before` the last two have no elasticity, of
llama3_tiny_checkpointless, the one by this code and the other by another checkout's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import add_arguments, check_load
from launcher.clusters.local_nodes import find_strays
from launcher.clusters.running.lock import read_lock
from resilience.events import read_events

BAR = 1.01
WARM_UP_STEPS = 50
LIMIT_S = 120.0
OFF = "resilience.elastic=null"
ELASTIC = "recipe=llama/llama3_tiny_elastic"
OLDER = ("recipe=llama/llama3_tiny_checkpointless", "resilience.faults=null")
_WORDS = (
    "trainer.num_nodes=1",
    "trainer.num_devices=2",
    "trainer.save_checkpoint=false",
    "trainer.max_steps=100000",
    "trainer.global_batch_size=8",
    "trainer.micro_batch_size=1",
    "resilience.checkpointless.spares_per_node=0",
    "oversubscribe=true",
    "action=run",
    "run.detach=true",
    "run.dir=run",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells two runs apart."""

    words: tuple[str, ...]
    tree: Path | None = None
    """Whose code it is; None: this one's."""


class Run:
    """A run at work, on one core at a time; ends with the block."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._folder = folder
        self._environment = dict(os.environ)
        if kind.tree:
            self._environment["PYTHONPATH"] = str(kind.tree)
        self._launch(*kind.words, *_WORDS)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._launch("cancel", "run")
        self._launch("clean", "run")

    def _launch(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "launcher", *words],
            cwd=self._folder, env=self._environment, check=True, capture_output=True,
        )  # fmt: skip

    def warm_up(self) -> None:
        """Return once the run has taken some steps."""
        until_s = time.monotonic() + LIMIT_S
        while len(self.steps(0.0)) < WARM_UP_STEPS:
            if time.monotonic() > until_s:
                raise SystemExit(f"a run has not taken {WARM_UP_STEPS} steps in {LIMIT_S:g} s")
            time.sleep(0.5)

    def move_to(self, core: int) -> None:
        """Have every thread of the run on this core."""
        holder = read_lock(self._folder / "run")
        assert holder is not None, "the run has ended"
        for pid in find_strays(holder.run_id):
            with suppress(OSError):  # a process, or a thread, that has ended
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), {core})

    def steps(self, since_s: float) -> list[float]:
        """Return how long the steps took that began since then."""
        took = [
            (event.time - float(event.fields["duration_s"]), float(event.fields["duration_s"]))
            for event in read_events(self._folder / "run" / "events.jsonl")
            if event.event == "step" and event.fields["duration_s"] is not None
        ]
        return [duration_s for began_s, duration_s in took if began_s >= since_s]


def compare(kinds: tuple[Kind, Kind], windows: int, seconds: float) -> list[float]:
    """Return how much longer a step of the first run is than of the second.

    One ratio for two windows.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    medians: list[tuple[float, float]] = []
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        pairs = zip(folders, kinds, strict=True)
        runs = [stack.enter_context(Run(folder, kind)) for folder, kind in pairs]
        for run in runs:
            run.warm_up()
        for window in range(windows):
            for number, run in enumerate(runs):
                run.move_to(cores[(number + window) % 2])
            began_s = time.time()
            time.sleep(seconds)
            first, second = (statistics.median(run.steps(began_s)) for run in runs)
            medians.append((first, second))
    windows_of_both = zip(medians[::2], medians[1::2], strict=True)
    return [((a / b) * (c / d)) ** 0.5 for (a, b), (c, d) in windows_of_both]


def describe(ratios: list[float]) -> str:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.4f} (quartiles {low:.4f} to {high:.4f}, n = {len(ratios)})"


def main() -> None:
    """Print how much longer a step is, and how much two runs of one kind differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--before", type=Path, help="checkout of another version")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    add_arguments(parser)
    arguments = parser.parse_args()
    machine = check_load(arguments)
    found = {}
    off, on = Kind((ELASTIC, OFF)), Kind((ELASTIC,))
    cases = {"off / off": (off, off), "on / off": (on, off)}
    if arguments.before:
        cases["off / before"] = (Kind(OLDER), Kind(OLDER, arguments.before.resolve()))
    for name, kinds in cases.items():
        found[name] = compare(kinds, arguments.windows, arguments.seconds)
        print(f"a step, elasticity {name}: {describe(found[name])}", flush=True)
    print(f"bar: {BAR}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "found": found}))


if __name__ == "__main__":
    main()
