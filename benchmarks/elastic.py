"""How long a run stands still when it gets smaller or larger: lost nodes, and changes asked for.

    python -m benchmarks.elastic [-n ROUNDS] [--mmap] [--gib GIB] [--json FILE]

llama3_tiny_elastic on this machine, four nodes of one worker. In each round a member is killed, a
node is asked to leave, the node that coordinates is killed, and a member falls silent; after each
the run grows back to four. Every process of a killed node is killed at once, and that of a silent
one stopped. A figure is the time from then, or from the last step of the old size, to the end of
the first step of the new size, less a normal step.

With --mmap the batches are mapped from memory, where another process makes them ahead.

With --gib each rank has so much state, and a node is asked to leave and comes back, no more.
The bar for one that comes is 0.5 s beyond what `benchmarks.repair`, which is run first, needs to
send the bytes to another node. The sums are those of `size` and there are no tiers, so that four
such ranks fit into one host.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.machine import add_arguments, check_load, write_json
from benchmarks.repair import LIVING, MESSAGES
from launcher.clusters.local_nodes import end_strays, find_strays
from launcher.clusters.running.lock import read_lock
from resilience.events import Event, read_events

NUM_NODES = 4
SETTLE_STEPS = 8
LIMIT_S = 120.0
KINDS = ("member killed", "coordinator killed", "member silent", "asked to leave", "node comes")
LEASE_S = 3.0
BARS_S = {**dict.fromkeys(KINDS, 0.3), "member silent": LEASE_S + 0.5}
LARGE_BAR_S = 0.5
"""Beyond the repair."""
_PARAMETERS_PER_LAYER = 12 * 1024 * 1024
_BYTES_PER_PARAMETER = 12
"""Of a weight and its two moments in float32."""
_WORDS = (
    "recipe=llama/llama3_tiny_elastic",
    f"trainer.num_nodes={NUM_NODES}",
    f"resilience.checkpointless.lease_s={LEASE_S}",
    "trainer.max_steps=100000",
    "trainer.save_checkpoint=false",
    "resilience.elastic.hold_s=0",
    "resilience.elastic.scale_up_snooze_s=0",
    "resilience.checkpointless.process_restarts_max=1000",
    "action=run",
    "run.detach=true",
    "oversubscribe=true",
    "run.dir=run",
)


class ElasticRun:
    """A run at work, and what its events say of it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._folder = folder
        self._launch(*_WORDS, *words)
        self._events = folder / "run" / "events.jsonl"

    def _launch(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "launcher", *words],
            cwd=self._folder, check=True, capture_output=True,
        )  # fmt: skip

    def end(self) -> list[Event]:
        """End the run; returns all its events."""
        self._launch("cancel", "run")
        # It would keep its checkpoints for another start.
        self._launch("clean", "run")
        return read_events(self._events)

    def settle(self, num_nodes: int) -> list[Event]:
        """Return the events once the run has taken steps with so many nodes."""
        return self._wait(lambda events: _is_settled(events, num_nodes))

    def lose(self, *, coordinator: bool = False, silent: bool = False) -> float:
        """Kill a node, or stop it and kill it afterwards; returns the seconds that were lost."""
        events = self.settle(NUM_NODES)
        opened = [each for each in events if each.event == "generation_opened"][-1]
        members = sorted({each.node for each in events if _is_of(each, opened.generation)})
        others = [node for node in members if node != opened.node]
        holder = read_lock(self._folder / "run")
        assert holder is not None
        name = opened.node if coordinator else others[-1]
        at_s = time.time()
        if silent:
            for pid in find_strays(holder.run_id, name):
                os.kill(pid, signal.SIGSTOP)
            lost_s = self._measure(opened.generation, at_s)
            end_strays(holder.run_id, name)
            return lost_s
        end_strays(holder.run_id, name)
        return self._measure(opened.generation, at_s)

    def scale(self, num_nodes: int, before: int) -> float:
        """Ask for another size; returns the seconds that the running ranks stood still."""
        events = self.settle(before)
        opened = [each for each in events if each.event == "generation_opened"][-1]
        self._launch("scale", "run", f"nodes={num_nodes}")
        return self._measure(opened.generation, None)

    def _measure(self, generation: int, at_s: float | None) -> float:
        """Return the seconds from then, or the old size's last step, to the new one's first."""
        events = self._wait(lambda events: _newest(events) > generation and _is_settled(events))
        if at_s is None:
            at_s = max(each.time for each in events if _is_step(each, generation))
        new = [each for each in events if each.generation > generation and _is_step(each)]
        normal_s = statistics.median(float(each.fields["duration_s"]) for each in new[1:])
        return new[0].time - at_s - normal_s

    def _wait(self, is_so: Callable[[list[Event]], bool]) -> list[Event]:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            if is_so(events := read_events(self._events)):
                return events
            time.sleep(0.2)
        raise SystemExit(f"the run has not come so far within {LIMIT_S:g} s")


def _is_step(event: Event, generation: int | None = None) -> bool:
    is_there = generation is None or event.generation == generation
    return event.event == "step" and event.fields["duration_s"] is not None and is_there


def _is_of(event: Event, generation: int) -> bool:
    return event.generation == generation and event.event == "process_group_ready"


def _newest(events: Sequence[Event]) -> int:
    return max((each.generation for each in events), default=-1)


def _is_settled(events: Sequence[Event], num_nodes: int | None = None) -> bool:
    """Return whether the newest generation has taken steps, with so many nodes."""
    opened = [each for each in events if each.event == "generation_opened"]
    if not opened or (num_nodes and opened[-1].fields["world_size"] != num_nodes):
        return False
    return sum(_is_step(each, _newest(events)) for each in events) >= SETTLE_STEPS


def run_rounds(number: int, *words: str) -> dict[str, list[float]]:
    """Return the seconds of each kind of change."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        run = ElasticRun(Path(folder), *words)
        try:
            for _ in range(number):
                found["member killed"].append(run.lose())
                found["node comes"].append(run.scale(NUM_NODES, NUM_NODES - 1))
                found["asked to leave"].append(run.scale(NUM_NODES - 1, NUM_NODES))
                found["node comes"].append(run.scale(NUM_NODES, NUM_NODES - 1))
                found["coordinator killed"].append(run.lose(coordinator=True))
                found["node comes"].append(run.scale(NUM_NODES, NUM_NODES - 1))
                found["member silent"].append(run.lose(silent=True))
                found["node comes"].append(run.scale(NUM_NODES, NUM_NODES - 1))
        finally:
            events = run.end()
    _check_sources(events)
    return found


def run_large(number: int, gib: float) -> dict[str, list[float]]:
    """Return the seconds of planned changes with so much state in each rank."""
    found: dict[str, list[float]] = {"asked to leave": [], "node comes": []}
    layers = round(gib * (1 << 30) / (_PARAMETERS_PER_LAYER * _BYTES_PER_PARAMETER))
    words = (
        f"model.num_layers={layers}",
        "model.hidden_size=1024",
        "model.ffn_hidden_size=3072",
        "model.num_heads=16",
        "model.num_kv_heads=8",
        "model.head_dim=64",
        "trainer.global_batch_size=4",
        "trainer.micro_batch_size=1",
        "trainer.order_of_sums=size",
        "data.seq_length=8",
        f"resources.shm_gib={NUM_NODES * (gib + 1):g}",
        "resilience.tiered=null",
        "resilience.elastic.may_lose_steps=true",
        "resilience.checkpointless.hang_deadline_s=120",
    )
    with tempfile.TemporaryDirectory() as folder:
        run = ElasticRun(Path(folder), *words)
        try:
            for _ in range(number):
                found["asked to leave"].append(run.scale(NUM_NODES - 1, NUM_NODES))
                found["node comes"].append(run.scale(NUM_NODES, NUM_NODES - 1))
        finally:
            events = run.end()
    _check_sources(events)
    return found


def time_repair(gib: float) -> float:
    """Return the seconds in which a rank's state goes to another node's rank, over loopback."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "repair.json")
        command = [
            sys.executable,
            "-m",
            "benchmarks.repair",
            "--gib",
            f"{gib:g}",
            "--json",
            str(file),
        ]
        subprocess.run(command, check=True, capture_output=True)
        seconds = json.loads(file.read_text())["seconds"][f"{LIVING}, {MESSAGES}"]
    return statistics.median(wall_s for wall_s, _ in seconds)


def _check_sources(events: Sequence[Event]) -> None:
    read = [each for each in events if each.event == "recovery_fallback"]
    if read:
        raise SystemExit(f"state came from elsewhere than memory: {read[0].fields}")


def main() -> None:
    """Print median, minimum and maximum of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--num-rounds", type=int, default=10)
    parser.add_argument("--mmap", action="store_true", help="with batches mapped from memory")
    parser.add_argument("--gib", type=float, help="state of each rank, for planned changes alone")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    add_arguments(parser)
    arguments = parser.parse_args()
    machine = check_load(arguments)
    number, gib = arguments.num_rounds, arguments.gib
    bars_s = BARS_S
    if gib:
        repair_s = time_repair(gib)
        print(f"{gib:g} GiB to another node's rank: {repair_s:.3f} s")
        bars_s = {"node comes": round(LARGE_BAR_S + repair_s, 3)}
    words = ("resilience/mmap=default",) if arguments.mmap else ()
    found = run_large(number, gib) if gib else run_rounds(number, *words)
    print("| change | beyond a step, s | n | bar |\n|---|---|---|---|")
    for kind, seconds in found.items():
        low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
        bar_s = bars_s.get(kind)
        word = f"{bar_s} s: {'holds' if middle <= bar_s else 'missed'}" if bar_s else "-"
        print(f"| {kind} | {middle:.3f} ({low:.3f} to {high:.3f}) | {len(seconds)} | {word} |")
    write_json(arguments.json, machine, found=found)


if __name__ == "__main__":
    main()
