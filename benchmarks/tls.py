"""Cost of TLS: a shard's way to another node's memory and back.

    python -m benchmarks.tls [-n 3] [--mib 512]

A shard is saved with one of three daemons on this machine, and timed until a second one has all of
it; then the third one, which has none, reads it. With and without TLS take turns; each value is
printed as it comes, then medians with extremes. `benchmarks.floods` has steps with and without TLS.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import xxhash

from benchmarks import machine
from benchmarks.checkpoint_nodes import JOB, NAMESPACE, choose_names, run_nodes, wait_held
from benchmarks.checkpoint_state import Plan
from resilience.tiered.client import TieredClient
from resilience.tiered.shard import ShardId, ShardMeta, piece_bounds

_TOKEN = "of the benchmark"
_KINDS = {"plain": False, "tls": True}


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=3, help="shards of each kind")
    parser.add_argument("--mib", type=int, default=512, help="size of a shard")
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


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    machine.check_load(arguments)
    found: dict[str, list[float]] = defaultdict(list)
    gib = arguments.mib / 1024
    for _, (kind, tls) in itertools.product(range(arguments.n), _KINDS.items()):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            seconds = time_shard(Path(folder), arguments.mib, tls=tls)
        for way, value_s in zip(("to", "from"), seconds, strict=True):
            name = f"{way} a peer in GiB/s, {kind}"
            found[name].append(gib / value_s)
            print(f"  {name}: {gib / value_s:.4g}", flush=True)
    for name, values in found.items():
        low, high = min(values), max(values)
        print(f"{name}: {statistics.median(values):.4g} ({low:.4g} to {high:.4g}), n {len(values)}")


if __name__ == "__main__":
    main()
