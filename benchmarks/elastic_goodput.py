"""What a run gets done of what its nodes could do, while nodes come and go.

    python -m benchmarks.elastic_goodput [--seconds 180] [--seeds 1,2,3] [--model small|llama]

One to four nodes of one worker on this machine; a step has 48 micro batches, each of 32 tokens and
with a sleep of 20 ms. The model is a small one that needs torch alone, or with `--model llama` that
of the recipe, whose imports and steps keep two cores busy. A node comes or goes every ten seconds
on average, by the seed alone and the same for both systems. Half of those that go are asked five
seconds before, the others are killed.

Goodput is kept steps over what the nodes that were there could have done, each as quick as one that
trains alone and without elasticity. A node is there from when its processes may be started until
they have ended. Beside that is the figure by which one that was asked counts until it would be
killed, even if it has ended before. torchrun has its time-outs as short as they may be, a
checkpoint into memory every ten steps, and a store that no node takes with it. Where its agents
lose each other it trains in two worlds at once; the figure then means nothing, and that is said.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks import figures
from benchmarks.elastic_torchrun import ElasticTorchrun
from benchmarks.elastic_trace import (
    NODES_MAX,
    NOTICE_S,
    NUM_AT_FIRST,
    Stay,
    Step,
    account,
    capacity,
    goodput,
    keep_steps,
    node_name,
    plan_happenings,
    plan_stays,
    until_ended,
)
from benchmarks.faultbench import free_ports, run_folder
from benchmarks.jobplan import JobPlan
from benchmarks.machine import add_arguments, check_load, names_of, write_json
from benchmarks.processes import end_processes
from benchmarks.recovery_peers.slow_trainer import SLEEP_VARIABLE
from launcher.clusters.local import endpoints, num_peer_ports
from launcher.clusters.local_files import script_name
from launcher.clusters.local_nodes import LocalNodes, end_strays
from launcher.clusters.ports import hold_ports
from launcher.clusters.running.cluster import RunFolder
from launcher.clusters.running.memory import remove_memory
from launcher.job import read_job
from launcher.rundir import EVENTS_FILE, JOB_FILE
from resilience.events import EventReader

BAR = 0.90
NUM_MICRO_BATCHES = 48
SLEEP_S = 0.02
CHECKPOINT_EVERY = 10
ALONE_S = 60.0
SETTLE_STEPS = 5
LIMIT_S = 120.0
POLL_S = 0.1
SYSTEMS = ("ours", "torchrun")
Model = Literal["small", "llama"]
WORKERS: Mapping[Model, tuple[str, str]] = {
    "small": ("benchmarks.recovery_peers.small_trainer",) * 2,
    "llama": ("recipes_training.preload", "benchmarks.recovery_peers.slow_trainer"),
}
"""Which modules an agent imports and runs, by the model."""
_WORDS = (
    "recipe=llama/llama3_tiny_elastic",
    "trainer.max_steps=100000",
    "trainer.save_checkpoint=false",
    f"trainer.global_batch_size={NUM_MICRO_BATCHES}",
    "trainer.micro_batch_size=1",
    # So small that two cores carry four nodes: what a device would take is the sleep.
    "data.seq_length=32",
    "model.num_layers=1",
    "action=render",
    "cluster=local",
    "oversubscribe=true",
    "run.dir=run",
)
ELASTIC = (
    f"trainer.num_nodes={NUM_AT_FIRST}",
    # A change that nothing is lost in costs less than what a node would do meanwhile.
    "resilience.elastic.hold_s=0",
    "resilience.elastic.scale_up_snooze_s=0",
    "resilience.checkpointless.process_restarts_max=1000",
    # Nodes are lost here, and no process alone.
    "resilience.checkpointless.spares_per_node=0",
)
ALONE = ("trainer.num_nodes=1", "resilience.elastic=null", "resilience.checkpointless=null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the runs of one system have in common."""

    system: str
    seconds: float
    model: Model
    keep: Path | None
    """Where logs and events are copied to."""


class Nodes(Protocol):
    """A run's nodes at work."""

    def clock(self) -> float:
        """Return the time, as the run's events have it."""

    def settle(self) -> float:
        """Return when the newest step ended, once the nodes have taken some together."""

    def do(self, what: str, node: str) -> None:
        """Start a node, ask it to go, or kill it."""

    def wait(self, seconds: float) -> None:
        """Wait, and collect what ends meanwhile."""

    def steps(self, began_s: float, seconds: float) -> list[Step]:
        """Return the steps that are kept of a window."""

    ended: list[tuple[str, float]]
    """Which node's processes were seen to have ended, and when by `clock`."""


class OurNodes:
    """Nodes of a recipe whose micro batches are slow."""

    def __init__(self, run_dir: Path, nodes: LocalNodes, selector: selectors.BaseSelector) -> None:
        self._nodes = nodes
        self._selector = selector
        self._num_nodes = len(nodes.running)
        self._going: set[str] = set()
        self._reader = EventReader(run_dir / EVENTS_FILE)
        self.events: list[Any] = []
        self.ended: list[tuple[str, float]] = []

    def clock(self) -> float:
        """Return the seconds since 1970."""
        return time.time()

    def read(self) -> None:
        """Read what is new."""
        self.events += self._reader.read_new()

    def settle(self) -> float:
        """Return when the newest step ended, once all nodes have taken some together."""

        def found() -> float | None:
            self.read()
            newest = max((each.generation for each in self.events), default=-1)
            told = [each for each in self.events if each.generation == newest]
            steps = [each for each in told if each.event == "step"]
            num = sum(each.event == "process_group_ready" for each in told)
            is_settled = num == self._num_nodes and len(steps) > SETTLE_STEPS
            return steps[-1].time if is_settled else None

        return wait_for(found, self.wait)

    def do(self, what: str, node: str) -> None:
        """Start a node, ask it to go, or kill it."""
        if what == "start":
            self._going.discard(node)
            self._nodes.add(node, self._selector)
            return
        self._going.add(node)
        if what == "ask":
            self._nodes.stop_node(node)
            return
        end_strays(self._nodes.run_id, node)
        until_s = time.monotonic() + LIMIT_S
        while node in self._nodes.running and time.monotonic() < until_s:
            self.wait(POLL_S)

    def wait(self, seconds: float) -> None:
        """Wait for so long, or until a node ends."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            status = self._nodes.collect(key.data, self._selector)
            self.ended.append((key.data, self.clock()))
            if key.data not in self._going:
                print(f"  {key.data} has ended with {status}", file=sys.stderr, flush=True)

    def steps(self, began_s: float, seconds: float) -> list[Step]:
        """Return the steps that are kept of a window."""
        self.read()
        return keep_steps(self.events, began_s, seconds)


class TorchrunNodes:
    """Agents of torchrun."""

    def __init__(self, run: ElasticTorchrun, num_nodes: int) -> None:
        self._run = run
        self._num_nodes = num_nodes
        self._asked: set[str] = set()
        self.ended: list[tuple[str, float]] = []

    def clock(self) -> float:
        """Return the seconds of the clock that workers use."""
        return time.monotonic()

    def settle(self) -> float:
        """Return when the newest step ended, once all nodes have taken some together."""
        return self._run.settle(self._num_nodes)[-1].at_s

    def do(self, what: str, node: str) -> None:
        """Start a node, ask it to go, or kill it."""
        number = _number(node)
        if what == "ask":
            self._asked.add(node)
        else:
            self._asked.discard(node)
        {"start": self._run.start, "ask": self._run.ask, "kill": self._run.end_node}[what](number)

    def wait(self, seconds: float) -> None:
        """Wait for so long, or a moment where a node that was asked has not ended yet."""
        time.sleep(max(0.0, min(seconds, POLL_S) if self._asked else seconds))
        for node in [each for each in self._asked if self._run.has_ended(_number(each))]:
            self._asked.remove(node)
            self.ended.append((node, self.clock()))

    def two_worlds_s(self) -> float:
        """Return for how long two worlds trained beside each other."""
        return figures.two_worlds_s(self._run.events())

    def steps(self, began_s: float, seconds: float) -> list[Step]:
        """Return the steps that are kept of a window."""
        kept = figures.keep_steps(self._run.events(), began_s, began_s + seconds)
        return [
            Step(number=each.step, end_s=each.done_s - began_s, generation=0)
            for each in kept
            if each.done_s > began_s
        ]


def _number(node: str) -> int:
    return int(node.removeprefix("node-"))


def wait_for(look: Callable[[], float | None], wait: Callable[[float], None]) -> float:
    """Return what is found at last; ends the benchmark after two minutes."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        if (found := look()) is not None:
            return found
        wait(POLL_S)
    raise SystemExit(f"the nodes have not trained together within {LIMIT_S:g} s")


def write_run(folder: Path, words: Sequence[str], model: Model) -> Path:
    """Render the recipe with workers that are slow; returns the run's folder."""
    told = subprocess.run(
        [sys.executable, "-m", "launcher", *_WORDS, *words],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if told.returncode:
        raise SystemExit(f"the launcher renders nothing: {told.stderr}")
    run_dir = folder / "run"
    for path in run_dir.glob(script_name("node-*")):
        text = path.read_text("utf-8")
        places = ("--preload=recipes_training.preload \\\n", "\n  recipes_training \\\n")
        for before, module in zip(places, WORKERS[model], strict=True):
            assert before in text, path
            text = text.replace(before, re.sub(r"recipes_training[.\w]*", module, before))
        path.write_text(text, "utf-8")
    return run_dir


@contextlib.contextmanager
def our_nodes(num_nodes: int, words: Sequence[str], setting: Setting) -> Iterator[OurNodes]:
    """Start nodes; none is left afterwards, nor what their checkpoint daemons hold."""
    os.environ[SLEEP_VARIABLE] = str(SLEEP_S)
    with run_folder(setting.keep) as folder:
        run_dir = write_run(Path(folder), words, setting.model)
        job = read_job(run_dir / JOB_FILE)
        names = [node_name(slot) for slot in range(num_nodes)]
        nodes = LocalNodes(run_dir, names, grace_s=NOTICE_S)
        try:
            with (
                selectors.DefaultSelector() as selector,
                hold_ports(num_nodes) as ports,
                hold_ports(num_peer_ports(job)) as peer_ports,
                nodes,
            ):
                nodes.start(endpoints(ports), selector, peer_ports)
                try:
                    yield OurNodes(run_dir, nodes, selector)
                finally:
                    nodes.kill()
        finally:
            end_strays(nodes.run_id)
            remove_memory(RunFolder(path=run_dir, job=job))


@contextlib.contextmanager
def torchrun_nodes(num_nodes: int, nodes_max: int, setting: Setting) -> Iterator[TorchrunNodes]:
    """Start agents; none is left afterwards."""
    with run_folder(setting.keep) as folder:
        plan = JobPlan(
            run_dir=folder,
            num_steps=10**6,
            ports=free_ports(1),
            gloo_timeout_s=30.0,
            checkpoint_every=CHECKPOINT_EVERY,
            num_micro_batches=NUM_MICRO_BATCHES,
            sleep_s=SLEEP_S,
            model=setting.model,
        )
        plan.write()
        try:
            run = ElasticTorchrun(
                plan, num_nodes=num_nodes, nodes_max=nodes_max, has_own_store=True
            )
            yield TorchrunNodes(run, num_nodes)
        finally:
            end_processes(folder)


def start_nodes(
    setting: Setting, *, is_alone: bool
) -> contextlib.AbstractContextManager[OurNodes | TorchrunNodes]:
    """Start the nodes that a window begins with, or one that stays alone."""
    num_nodes = 1 if is_alone else NUM_AT_FIRST
    if setting.system == "ours":
        return our_nodes(num_nodes, ALONE if is_alone else ELASTIC, setting)
    return torchrun_nodes(num_nodes, 1 if is_alone else NODES_MAX, setting)


def play(nodes: Nodes, stays: Sequence[Stay], seconds: float) -> float:
    """Have nodes come and go for a window; returns when it began."""
    began_s = nodes.settle()

    def wait_until(at_s: float) -> None:
        while (left_s := began_s + at_s - nodes.clock()) > 0:
            nodes.wait(left_s)

    for each in plan_happenings(stays):
        if each.at_s < seconds:
            wait_until(each.at_s)
            nodes.do(each.what, each.node)
    wait_until(seconds)
    return began_s


def measure_alone(setting: Setting) -> float:
    """Return the steps a second of one node."""
    seconds = min(ALONE_S, setting.seconds)
    with start_nodes(setting, is_alone=True) as nodes:
        began_s = play(nodes, (), seconds)
        steps = nodes.steps(began_s, seconds)
    return (steps[-1].number - steps[0].number) / (steps[-1].end_s - steps[0].end_s)


def measure(setting: Setting, seed: int, alone_per_s: float) -> dict[str, Any]:
    """Return what became of one window."""
    seconds, stays = setting.seconds, plan_stays(seed, setting.seconds)
    with start_nodes(setting, is_alone=False) as nodes:
        began_s = play(nodes, stays, seconds)
        steps = nodes.steps(began_s, seconds)
        ended = [(node, at_s - began_s) for node, at_s in nodes.ended]
        planned, stays = stays, until_ended(stays, ended)
        rate = {"seconds": seconds, "alone_per_s": alone_per_s}
        found = {
            "system": setting.system,
            "seed": seed,
            "num_steps": len(steps),
            "node_s": capacity(stays, seconds),
            "goodput": goodput(len(steps), stays, **rate),
            "goodput_until_killed": goodput(len(steps), planned, **rate),
        }
        if isinstance(nodes, OurNodes):
            found["lost"] = account(
                steps, stays, nodes.events,
                began_s=began_s, seconds=seconds, alone_per_s=alone_per_s,
            )  # fmt: skip
        else:
            found["two_worlds_s"] = nodes.two_worlds_s()
    return found


def render_row(found: dict[str, Any], alone_per_s: float, seconds: float) -> str:
    """Render a line of the table."""
    verdict = ""
    if found["system"] == "ours":
        verdict = "holds" if found["goodput"] >= BAR else "missed"
    elif both_s := found["two_worlds_s"]:
        verdict = f"two worlds for {both_s:.0f} s"
    return (
        f"| {found['system']} | {alone_per_s:.3f} | {found['seed']} "
        f"| {found['node_s'] / seconds:.2f} | {found['num_steps']} "
        f"| {found['goodput']:.3f} | {verdict} | {found['goodput_until_killed']:.3f} |"
    )


def render_account(found: dict[str, Any]) -> str:
    """Render what node-seconds were lost to, as shares of all."""
    shares = sorted(found["lost"].items(), key=lambda each: -each[1])
    words = ", ".join(f"{what} {lost / found['node_s']:.1%}" for what, lost in shares)
    return f"ours, seed {found['seed']}, lost: {words}"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=180, help="length of each window")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--systems", type=names_of(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--model", choices=WORKERS, default="small")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--keep", type=Path, help="copy logs and events of all runs here")
    add_arguments(parser)
    arguments = parser.parse_args()
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    return arguments


def main() -> None:
    """Measure each system alone and under each seed, and print a line for each."""
    arguments = parse_arguments()
    machine = check_load(arguments)
    for seed in arguments.seeds:
        happenings = plan_happenings(plan_stays(seed, arguments.seconds))
        words = " ".join(f"{each.at_s:.0f}:{each.what}:{each.node}" for each in happenings)
        print(f"seed {seed}: {words}")
    print(
        "| system | one node alone, steps/s | seed | nodes on average | steps | goodput | bar "
        "| until killed |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    found = []
    for system in arguments.systems:
        setting = Setting(
            system=system, seconds=arguments.seconds, model=arguments.model, keep=arguments.keep
        )
        alone_per_s = measure_alone(setting)
        for seed in arguments.seeds:
            found.append({**measure(setting, seed, alone_per_s), "alone": alone_per_s})
            print(render_row(found[-1], alone_per_s, arguments.seconds), flush=True)
    print()
    for each in found:
        if "lost" in each:
            print(render_account(each))
    write_json(arguments.json, machine, seconds=arguments.seconds, found=found)


if __name__ == "__main__":
    main()
