"""How long a run takes to its first step: started afresh, and gone on with by `launcher continue`.

    python -m benchmarks.continuing [-n RUNS]

Four workers on two nodes of this machine, recovery, checkpoints in memory and in a folder.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from resilience.events import read_events

_WORDS = (
    "recipe=llama/llama3_tiny_checkpointless",
    "resilience.faults=null",
    "trainer.optimizer.decay_steps=60",
    "trainer.max_steps=22",
    "resilience/tiered=folder",
    "action=run",
)


def main() -> None:
    """Print minimum, median and maximum of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=5, help="runs of each (default 5)")
    number = parser.parse_args().n
    with tempfile.TemporaryDirectory() as folder:
        found = [_measure(Path(folder), f"run-{each}") for each in range(number)]
    for name, seconds in zip(("fresh", "continue"), zip(*found, strict=True), strict=True):
        low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
        sys.stdout.write(f"{name}: {middle:.2f} s ({low:.2f}-{high:.2f}), n = {number}\n")


def _measure(folder: Path, name: str) -> tuple[float, float]:
    """Return the seconds of a fresh start, and of going on with it."""
    store = f"resilience.tiered.store.url=folder:{folder / 'store'}"
    _launch(folder, *_WORDS, store, f"run.name={name}")
    _launch(folder, "continue", name, "trainer.max_steps=24")
    events = read_events(folder / "runs" / name / "events.jsonl")
    begun = [each.time for each in events if each.event == "run_started"]
    steps = [each for each in events if each.event == "step" and each.fields["duration_s"]]
    firsts = [
        min(each.time for each in steps if each.fields["start"] == start) for start in range(2)
    ]
    return firsts[0] - begun[0], firsts[1] - begun[1]


def _launch(folder: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "launcher", *words], cwd=folder, check=True, capture_output=True
    )


if __name__ == "__main__":
    main()
