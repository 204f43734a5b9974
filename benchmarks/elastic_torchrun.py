"""What torchrun does where `benchmarks.elastic` loses and adds a node.

    python -m benchmarks.elastic_torchrun [-n ROUNDS]

Four agents of one worker, --nnodes 1:4, with time-outs as short as they may be (a heartbeat each
second, five of which may be missing: with two, agents that import on busy cores are taken for lost,
and begin two worlds), and torch's distributed checkpoint into memory at each step.
In each round one agent is killed with its worker, and another one is started. A figure is the time
from the kill, or from the last step of the old size, to the end of the first step of the new one,
less a normal step, whose checkpoint is part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.events import Event, EventReader
from benchmarks.faultbench import free_ports, job_environment, run_folder
from benchmarks.jobplan import JobPlan
from benchmarks.machine import add_arguments, check_load
from benchmarks.processes import end_processes, find_processes

NUM_NODES = 4
SETTLE_STEPS = 8
LIMIT_S = 180.0
_NODE = "ELASTIC_NODE"
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A store for each round: in one for all of them ranks meet the addresses of the round before."""
_CONF = "last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=5"


class ElasticTorchrun:
    """Agents at work, and what their workers tell.

    The first agent keeps the store of all, but where that `has_own_store`.
    """

    def __init__(
        self,
        plan: JobPlan,
        *,
        num_nodes: int = NUM_NODES,
        nodes_max: int = NUM_NODES,
        has_own_store: bool = False,
    ) -> None:
        self._plan = plan
        self._nodes_max = nodes_max
        self._has_own_store = has_own_store
        self._reader = EventReader(plan.run_dir)
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        if has_own_store:
            self._start_store()
        for number in range(num_nodes):
            self.start(number)

    def _start_store(self) -> None:
        words = f"'127.0.0.1', {self._plan.ports[0]}, is_master=True, wait_for_workers=False"
        program = f"import signal, torch.distributed as d; s = d.TCPStore({words}); signal.pause()"
        subprocess.Popen(
            [sys.executable, "-c", program], env=job_environment(self._plan),
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def start(self, number: int) -> None:
        """Start an agent."""
        is_host = number == 0 and not self._has_own_store
        arguments = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{self._nodes_max}"]
        arguments += ["--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
        arguments += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._plan.ports[0]}"]
        arguments += ["--rdzv-id=elastic", f"--rdzv-conf={_CONF},is_host={int(is_host)}"]
        arguments += ["--local-addr=127.0.0.1", "-m"]
        with Path(self._plan.run_dir, f"log-{number}").open("ab") as log:
            self._agents[number] = subprocess.Popen(
                [*arguments, "benchmarks.recovery_peers.elastic_torchrun_worker"],
                env={**job_environment(self._plan), **_OWN_STORE, _NODE: str(number)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def settle(self, size: int) -> list[Event]:
        """Return the steps of the newest round, once it has taken some at this size."""
        return self._wait_for(size, after_s=0.0, number=SETTLE_STEPS)

    def kill(self, number: int) -> tuple[float, int]:
        """Kill an agent and its worker; returns the seconds and the steps that were lost."""
        self.settle(NUM_NODES)
        at_s = time.monotonic()
        self.end_node(number)
        after = self._wait_for(NUM_NODES - 1, after_s=at_s, number=SETTLE_STEPS)
        last = self._last_before(after[0], NUM_NODES)
        return after[0].at_s - at_s - normal_s(after), last.step + 1 - after[0].step

    def ask(self, number: int) -> None:
        """Ask an agent to end."""
        self._agents[number].terminate()

    def has_ended(self, number: int) -> bool:
        """Return whether an agent has ended."""
        return self._agents[number].poll() is not None

    def end_node(self, number: int) -> None:
        """Kill an agent and its worker."""
        mark = f"{_NODE}={number}".encode()
        for pid in find_processes(self._plan.run_dir):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
        self._agents.pop(number).wait()

    def events(self) -> list[Event]:
        """Return all that the workers have told so far."""
        self._reader.read_new()
        return self._reader.events

    def grow(self, number: int) -> tuple[float, int]:
        """Start an agent; returns for how long nobody trained, and the steps that were lost."""
        self.settle(NUM_NODES - 1)
        at_s = time.monotonic()
        self.start(number)
        after = self._wait_for(NUM_NODES, after_s=at_s, number=SETTLE_STEPS)
        last = self._last_before(after[0], NUM_NODES - 1)
        return after[0].at_s - last.at_s - normal_s(after), last.step + 1 - after[0].step

    def _last_before(self, first: Event, size: int) -> Event:
        """Return the last step of the size that the run had before."""
        told = [each for each in self._reader.events if each.word == "committed"]
        steps = [each for each in told if each.at_s < first.at_s and each.world == size]
        return max(steps, key=lambda each: each.at_s)

    def _steps(self, size: int, after_s: float = 0.0) -> list[Event]:
        """Return what rank 0 has told of steps at this size since then."""
        self._reader.read_new()
        told = sorted(self._reader.events, key=lambda each: each.at_s)
        steps = [each for each in told if each.word == "committed" and each.rank == 0]
        others = [each.at_s for each in steps if each.world != size]
        since_s = max([after_s, *(others if not after_s else [])])
        return [each for each in steps if each.world == size and each.at_s > since_s]

    def _wait_for(self, size: int, *, after_s: float, number: int) -> list[Event]:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            steps = self._steps(size, after_s)
            if len(steps) >= number:
                return steps
            time.sleep(0.1)
        raise SystemExit(f"torchrun has not come to {size} ranks within {LIMIT_S:g} s")


def normal_s(steps: Sequence[Event]) -> float:
    """Return how long a step takes, its checkpoint with it."""
    times = [each.at_s for each in steps]
    return statistics.median(late - early for early, late in pairwise(times))


def main() -> None:
    """Print median, minimum and maximum of both kinds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", "--num-rounds", type=int, default=3)
    add_arguments(parser)
    arguments = parser.parse_args()
    check_load(arguments)
    found: dict[str, list[tuple[float, int]]] = {"a member is killed": [], "a node comes": []}
    with run_folder() as folder:
        plan = JobPlan(run_dir=folder, num_steps=10**6, ports=free_ports(1), gloo_timeout_s=30.0)
        plan.write()
        try:
            run = ElasticTorchrun(plan)
            for _ in range(arguments.num_rounds):
                found["a member is killed"].append(run.kill(NUM_NODES - 1))
                found["a node comes"].append(run.grow(NUM_NODES - 1))
        finally:
            end_processes(folder)
    print("| change | beyond a step, s | steps lost | n |\n|---|---|---|---|")
    for kind, values in found.items():
        seconds = [each for each, _ in values]
        middle, lost = statistics.median(seconds), sum(steps for _, steps in values)
        print(f"| {kind} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {lost} "
              f"| {len(values)} |")  # fmt: skip


if __name__ == "__main__":
    main()
