"""Cost of TLS: a shard's way to another node's memory and back, and a step of two nodes.

    python -m benchmarks.tls [-n 7] [--mib 512] [--steps 200] [--parts shards,steps]

A shard is saved with one of three daemons on this machine, and timed until a second one has all of
it; then the third one, which has none, reads it. Steps are those of llama3_tiny_checkpointless on
two nodes of one worker, whose agents and daemons have TLS or not; gloo, which carries gradients,
never has. With and without take turns. Medians with extremes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import xxhash

from benchmarks import machine
from benchmarks.checkpoint_nodes import JOB, NAMESPACE, choose_names, run_nodes, wait_held
from benchmarks.checkpoint_state import Plan
from resilience.event_files import EVENTS_NAME
from resilience.events import read_events
from resilience.tiered.client import TieredClient
from resilience.tiered.shard import ShardId, ShardMeta, piece_bounds

_TOKEN = "of the benchmark"
_WARM_STEPS = 20
_KINDS = {"plain": False, "tls": True}


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=7, help="shards and runs of each kind")
    parser.add_argument("--mib", type=int, default=512, help="size of a shard")
    parser.add_argument("--steps", type=int, default=200, help="of a run")
    parser.add_argument("--parts", default="shards,steps")
    machine.add_arguments(parser)
    return parser.parse_args()


def time_shard(folder: Path, mib: int, *, tls: bool) -> tuple[float, float]:
    """Return how long a shard takes to a peer's memory, and from there to a third node."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(_TOKEN)
    own, peer, third = names = choose_names(["own", "peer-1", "peer-2"])
    plan = Plan(folder=folder, mib_per_rank=mib, num_ranks=1)
    content = os.urandom(mib << 20)
    sums = [xxhash.xxh3_64_intdigest(content[a:b]) for a, b in piece_bounds(len(content))]
    name = ShardId(namespace=NAMESPACE, step=1, generation=0, shard="0")
    meta = ShardMeta(
        id=name, num_shards=1, num_bytes=len(content), tensors=(), checksums=tuple(sums), rest={}
    )
    with run_nodes(plan, names, ("--token-file", str(token), *(("--tls",) if tls else ()))):
        clients = [
            TieredClient(
                folder / each / "memoryd.sock", namespace=NAMESPACE, job=JOB, node=each,
                token=_TOKEN,
            )
            for each in (own, peer, third)
        ]  # fmt: skip
        with clients[0].begin(
            step=1, generation=0, shard="0", num_shards=1, num_bytes=len(content)
        ) as draft:
            draft.memory[:] = content
            began_s = time.monotonic()
            draft.commit(meta)
        wait_held(clients[1], 1, 1)
        sent_s = time.monotonic()
        with clients[2].read(step=1, generation=0, shard="0") as loan:
            read_s = time.monotonic()
            assert loan.memory == content
        for each in clients:
            each.close()
    return sent_s - began_s, read_s - sent_s


def time_steps(folder: Path, num_steps: int, *, tls: bool) -> Iterator[float]:
    """Yield how long each step took on the first rank, in seconds."""
    words = [
        "recipe=llama/llama3_tiny_checkpointless", "resilience.faults.injected=[]",
        "resilience/tiered=ram", "trainer.num_nodes=2", "trainer.num_devices=1",
        f"trainer.max_steps={num_steps}", "trainer.log_every_n_steps=1", "action=run",
        f"cluster.tls={str(tls).lower()}", f"run.dir={folder / 'run'}",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "launcher", *words], check=True, capture_output=True)
    for event in read_events(folder / "run" / EVENTS_NAME):
        seconds = event.fields.get("duration_s") if event.event == "step" else None
        if seconds is not None and (event.step or 0) >= _WARM_STEPS:
            yield seconds


def show(name: str, values: list[float], unit: str) -> None:
    """Print a median with extremes."""
    low, high = min(values), max(values)
    print(f"{name}: {statistics.median(values):.4g} ({low:.4g} to {high:.4g}) {unit}, "
          f"n {len(values)}", flush=True)  # fmt: skip


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    machine.check_load(arguments)
    found: dict[str, list[float]] = defaultdict(list)
    for part in arguments.parts.split(","):
        for _ in range(arguments.n):
            for kind, tls in _KINDS.items():
                with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                    if part == "shards":
                        to_s, from_s = time_shard(Path(folder), arguments.mib, tls=tls)
                        found[f"to a peer, {kind}"].append(arguments.mib / 1024 / to_s)
                        found[f"from a peer, {kind}"].append(arguments.mib / 1024 / from_s)
                    else:
                        steps = time_steps(Path(folder), arguments.steps, tls=tls)
                        found[f"step, {kind}"].append(1000 * statistics.median(steps))
    for name, values in found.items():
        show(name, values, "ms" if name.startswith("step") else "GiB/s")


if __name__ == "__main__":
    main()
