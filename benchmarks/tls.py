"""Cost of TLS: a shard's way to another node's memory and back, and a step of two nodes.

    python -m benchmarks.tls [-n 3] [--mib 512] [--steps 100] [--parts shards,steps]

A shard is saved with one of three daemons on this machine, and timed until a second one has all of
it; then the third one, which has none, reads it. Steps are those of llama3_tiny_checkpointless on
two nodes of one worker, whose agents and daemons have TLS or not; gloo, which carries gradients,
never has. With and without take turns; each value is printed as it comes, then medians with
extremes. The defaults take 3 minutes at most on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
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
    parser.add_argument("-n", type=int, default=3, help="shards and runs of each kind")
    parser.add_argument("--mib", type=int, default=512, help="size of a shard")
    parser.add_argument("--steps", type=int, default=100, help="of a run")
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


def measure(part: str, folder: Path, given: argparse.Namespace, kind: str) -> dict[str, float]:
    """Return one value of each of a part's rows, by its name."""
    if part == "steps":
        steps = time_steps(folder, given.steps, tls=_KINDS[kind])
        return {f"step in ms, {kind}": 1000 * statistics.median(steps)}
    to_s, from_s = time_shard(folder, given.mib, tls=_KINDS[kind])
    gib = given.mib / 1024
    return {
        f"to a peer in GiB/s, {kind}": gib / to_s,
        f"from a peer in GiB/s, {kind}": gib / from_s,
    }


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    machine.check_load(arguments)
    found: dict[str, list[float]] = defaultdict(list)
    for part, _, kind in itertools.product(arguments.parts.split(","), range(arguments.n), _KINDS):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            for name, value in measure(part, Path(folder), arguments, kind).items():
                found[name].append(value)
                print(f"  {name}: {value:.4g}", flush=True)
    for name, values in found.items():
        low, high = min(values), max(values)
        print(f"{name}: {statistics.median(values):.4g} ({low:.4g} to {high:.4g}), n {len(values)}")


if __name__ == "__main__":
    main()
