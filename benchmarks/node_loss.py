"""How long a run of two nodes and a standby node stands still when one of the three is lost.

    python -m benchmarks.node_loss [-n 3] [--network] [--json FILE]

Every process of a node is killed at once, the agent's among them: in turn the node that hosts
store and coordinator, the other member, and the standby. The time is from the kill until all
four ranks have committed the next step, a normal step included.

On one host the kernel tells the others of the end of each connection. With --network each node is
a host of its own (network namespaces, which need root), and is cut off before it is killed, as one
that loses its power: only its silence tells of it, after the agents' default lease.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import figures, machine
from benchmarks.events import Event, EventReader
from benchmarks.faultbench import job_environment, make_plan, run_folder
from benchmarks.jobplan import NUM_RANKS, JobPlan
from benchmarks.namespaces import NamespaceError, Network
from benchmarks.ours import HANG_DEADLINE_S, OURS
from benchmarks.processes import Command, ProcessJob, find_processes
from resilience.events import read_events

NODES = ("n0", "n1", "n2")
ROLES = ("coordinator", "member", "standby")
NODE_VARIABLE = "NODE_LOSS_NODE"
ENDLESS = 10**9
WARM_STEP = 8
WATCH_S = 0.02
LIMIT_S = 60.0
BAR_S = 5.0
NETWORK_BAR_S = 4.0
"""The lease, and a second more."""
MTU = 65000
"""A switch of Python takes its time for each frame."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One lost node."""

    role: str
    seconds: float
    steps_lost: int
    """Steps that a rank had committed and committed again."""


def agent_command(plan: JobPlan, node: str, network: Network | None) -> Command:
    """Return the agent of one node: two ranks, one spare."""
    options = {
        "--nnodes": 2,
        "--standby-nodes": 1,
        "--nproc-per-node": NUM_RANKS // 2,
        "--node-name": node,
        "--run-dir": plan.run_dir,
        "--warm": "program",
    }
    environment = {**job_environment(plan), NODE_VARIABLE: node}
    arguments = [sys.executable, "-m"]
    if network is None:
        arguments += [
            "resilience.agent",
            f"--rdzv-endpoint=127.0.0.1:{plan.ports[0]}",
            "--local-addr=127.0.0.1",
            f"--hang-deadline-s={HANG_DEADLINE_S}",
        ]
    else:
        host = NODES.index(node)
        options_there = network.agent_options(host, Path(plan.run_dir))
        arguments += [*network.words(host), "resilience.agent", *options_there]
        del environment["GLOO_SOCKET_IFNAME"]
    arguments += [f"{key}={value}" for key, value in options.items()]
    for module in ("torch", "transformers", "benchmarks.recovery_peers.job"):
        arguments += ["--preload", module]
    arguments += ["--", "python", "-m", "benchmarks.recovery_peers.ours_worker"]
    return Command(arguments=arguments, environment=environment)


def choose_node(role: str, run_dir: str) -> str:
    """Return the node that has the role in the first generation."""
    events = read_events(Path(run_dir, "events.jsonl"))
    coordinator = next(each.node for each in events if each.event == "generation_opened")
    members = ranked_nodes(run_dir)
    by_role = {
        "coordinator": coordinator,
        "member": next(node for node in sorted(members, reverse=True) if node != coordinator),
        "standby": next(node for node in NODES if node not in members),
    }
    return by_role[role]


def ranked_nodes(run_dir: str) -> set[str]:
    """Return the nodes whose processes have committed steps."""
    pids = {event.pid for event in EventReader(run_dir).read_new() if event.word == "committed"}
    return {node for node in NODES if any(is_of_node(pid, node) for pid in pids)}


def is_of_node(pid: int, node: str) -> bool:
    """Return whether a process plays a part of the node."""
    with contextlib.suppress(OSError):
        return f"{NODE_VARIABLE}={node}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def kill_node(run_dir: str, node: str, network: Network | None) -> float:
    """Kill all processes of a node, cut off from the network before; returns when."""
    pids = [pid for pid in find_processes(run_dir) if is_of_node(pid, node)]
    killed_s = time.monotonic()
    if network is not None:
        network.cut(NODES.index(node))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return killed_s


def wait_for(reader: EventReader, is_there: Callable[[list[Event]], bool]) -> None:
    """Read events until it is so; ends the benchmark after a minute."""
    until_s = time.monotonic() + LIMIT_S
    while not is_there(reader.events):
        if time.monotonic() > until_s:
            raise SystemExit(f"no step on all ranks within {LIMIT_S:.0f} s")
        time.sleep(WATCH_S)
        reader.read_new()


def lose_node(role: str, *, has_network: bool) -> Loss:
    """Run the job until it is warm, kill the node and wait for the next step of all ranks."""
    with (
        run_folder() as folder,
        Network(len(NODES), mtu=MTU) if has_network else contextlib.nullcontext() as network,
    ):
        plan = make_plan(OURS, folder, num_steps=ENDLESS, faults=())
        plan.write()
        job = ProcessJob(folder, [agent_command(plan, node, network) for node in NODES])
        reader = EventReader(folder)
        try:
            wait_for(reader, lambda events: is_warm(figures.last_steps(events)))
            killed_s = kill_node(folder, choose_node(role, folder), network)
            reader.read_new()
            before = [each for each in reader.events if each.at_s < killed_s]
            wanted = max(figures.last_steps(before).values()) + 1

            def caught() -> dict[int, float]:
                found: dict[int, float] = {}
                for each in figures.named(reader.events, "committed"):
                    if each.step >= wanted and each.at_s > killed_s:
                        found.setdefault(each.rank, each.at_s)
                return found

            wait_for(reader, lambda events: len(caught()) == NUM_RANKS)
            seconds = max(caught().values()) - killed_s
        finally:
            job.end()
        done = {(each.rank, each.step) for each in figures.named(before, "committed")}
        after = [each for each in reader.events if each.at_s > killed_s]
        again = done & {(each.rank, each.step) for each in figures.named(after, "committed")}
    return Loss(role=role, seconds=seconds, steps_lost=len({step for _, step in again}))


def is_warm(steps: dict[int, int]) -> bool:
    """Return whether all ranks are past their first steps."""
    return len(steps) == NUM_RANKS and min(steps.values()) >= WARM_STEP


def measure(number: int, *, has_network: bool) -> Iterator[Loss]:
    """Lose each node in turn, so many times."""
    for role in ROLES:
        for _ in range(number):
            loss = lose_node(role, has_network=has_network)
            print(f"  {role}: {loss.seconds:.2f} s", file=sys.stderr, flush=True)
            yield loss


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", "--number", type=int, default=3, help="losses of each node")
    parser.add_argument(
        "--network", action="store_true", help="lose nodes that are hosts of their own"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    machine.add_arguments(parser)
    arguments = parser.parse_args()
    about = machine.check_load(arguments)
    bar_s = NETWORK_BAR_S if arguments.network else BAR_S
    try:
        losses = list(measure(arguments.number, has_network=arguments.network))
    except NamespaceError as error:
        raise SystemExit(f"--network: {error}") from error
    print("| lost node | until the next step of all ranks, s | steps lost | bar s |")
    print("|---|---|---|---|")
    for role in ROLES:
        of_role = [each for each in losses if each.role == role]
        times = figures.spread([each.seconds for each in of_role])
        lost = " ".join(str(each.steps_lost) for each in of_role)
        print(f"| {role} | {times} | {lost} | {bar_s:g} |")
    machine.write_json(arguments.json, about, bar_s=bar_s, losses=losses)


if __name__ == "__main__":
    main()
