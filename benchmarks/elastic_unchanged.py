"""What a step costs more where a run may change its size and does not.

    python -m benchmarks.elastic_unchanged [--pairs 10] [--steps 300] [--json FILE]

llama3_tiny_elastic with one node of two workers on this machine, as it is, and with
`resilience.elastic=null`, in turn: whole runs, each of them twice in a pair, so that the second
figure says how much two runs of one kind differ. A run's figure is the median time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import add_arguments, check_load
from benchmarks.overhead_figures import judge_pairs
from resilience.events import read_events

BAR = 1.01
WARM_UP = 20
KINDS = {"off": ("resilience.elastic=null",), "on": (), "off again": ("resilience.elastic=null",)}
_WORDS = (
    "recipe=llama/llama3_tiny_elastic",
    "trainer.num_nodes=1",
    "trainer.num_devices=2",
    "trainer.save_checkpoint=false",
    "trainer.global_batch_size=32",
    "trainer.micro_batch_size=4",
    "resilience.checkpointless.spares_per_node=0",
    "action=run",
    "run.dir=run",
)


def time_run(words: tuple[str, ...], steps: int) -> float:
    """Return the seconds of a run's median step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher", *_WORDS, f"trainer.max_steps={steps}", *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        events = read_events(Path(folder, "run", "events.jsonl"))
        subprocess.run(
            [sys.executable, "-m", "launcher", "clean", "run"],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    took = [each.fields["duration_s"] for each in events if each.event == "step"]
    if len(took) != steps:
        raise SystemExit(f"the run told of {len(took)} steps, and had {steps}")
    return statistics.median(took[WARM_UP:])


def main() -> None:
    """Print how much longer a step is, and how much two runs of one kind differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    add_arguments(parser)
    arguments = parser.parse_args()
    machine = check_load(arguments)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for pair in range(arguments.pairs):
        for kind in list(KINDS) if pair % 2 else reversed(list(KINDS)):
            found[kind].append(time_run(KINDS[kind], arguments.steps))
    ratio = judge_pairs(found["on"], found["off"])
    of_one_kind = judge_pairs(found["off again"], found["off"])
    print(f"a step, elastic on / off: {ratio}, bar {BAR}")
    print(f"off / off: {of_one_kind}, {1e3 * statistics.median(found['off']):.2f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "found": found}))


if __name__ == "__main__":
    main()
