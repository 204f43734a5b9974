"""Daemons of the checkpoint benchmark: one for the ranks, and others on the same machine.

Each has a folder of its own, and they reach each other over TCP alone.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.checkpoint_state import Plan, until
from resilience.tiered.client import TieredClient
from resilience.tiered.placement import Node, choose_peers

NAMESPACE, JOB = "bench", "bench-checkpoint"
OWN = "own"
LIMIT_S = 120.0


def find_ports(number: int) -> list[int]:
    """Return free ports of loopback."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [each.getsockname()[1] for each in sockets]


def choose_names(names: Sequence[str]) -> list[str]:
    """Return names of nodes: the ranks' own, the one its shards are copied to, and others."""
    (peer,) = choose_peers([Node(name=each, domain=each) for each in names], OWN, 1)
    return [OWN, peer.name, *(each for each in names if each not in (OWN, peer.name))]


@contextlib.contextmanager
def run_nodes(
    plan: Plan, names: Sequence[str], options: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a daemon a node, each with room for two states, until the block ends."""
    ports = dict(zip(names, find_ports(len(names)), strict=True))
    with contextlib.ExitStack() as stack:
        daemons = []
        for name in names:
            words = ["--node", name, "--peer-listen", f"127.0.0.1:{ports[name]}"]
            for other in names:
                if other != name:
                    words += ["--peer", f"{other}=127.0.0.1:{ports[other]}"]
            budget_mib = 2 * plan.num_ranks * (plan.mib_per_rank + 1)
            daemons.append(
                stack.enter_context(run_daemon(plan.folder / name, budget_mib, [*words, *options]))
            )
        yield daemons


@contextlib.contextmanager
def run_daemon(
    folder: Path, budget_mib: int, options: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one daemon until the block ends; it takes its memory with it."""
    command = [sys.executable, "-m", "resilience.tiered.memoryd", "--dir", str(folder)]
    command += ["--budget-mib", str(budget_mib), "--remove-on-exit", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            if not daemon.stdout.readline():
                raise SystemExit(f"the daemon ended with {daemon.wait()}: {' '.join(command)}")
            yield daemon
        finally:
            daemon.terminate()
            daemon.wait(LIMIT_S)


def make_client(plan: Plan, node: str) -> TieredClient:
    """Return a rank's way to a node's daemon."""
    path = plan.folder / node / "memoryd.sock"
    return TieredClient(path, namespace=NAMESPACE, job=JOB, node=node)


def count_held(client: TieredClient, step: int) -> int:
    """Return how many shards of a step a node has in memory."""
    rows = client.status()["namespaces"].get(NAMESPACE, [])
    return sum(row["num_held"] for row in rows if row["step"] == step)


def wait_held(client: TieredClient, step: int, number: int) -> None:
    """Block until a node has that many shards of a step."""
    with until(f"step {step}", LIMIT_S) as pause:
        while count_held(client, step) < number:
            pause()


def wait_alone(client: TieredClient, step: int) -> None:
    """Block until a node holds one step alone: what is older went."""
    with until(f"the end of what is older than step {step}", LIMIT_S) as pause:
        while any(row["step"] != step for row in client.status()["namespaces"].get(NAMESPACE, [])):
            pause()
