"""Runs a job under node agents, and holds what came of it against the undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.namespaces import Network
from launcher.clusters.agent import agent_config
from launcher.job import Job
from launcher.rundir import NODE_FILE
from resilience.events import Event, EventReader, read_events
from resilience.node_config import NodeConfig
from resilience.whole_files import replace_text
from tests.ports import free_ports
from tests.processes import processes_with
from tests.recipes_training.jobs import MEGATRON, make_job, write_job
from tests.recipes_training.workers import ROOT, Outcome
from tests.warm import Process, start

MARK = "RECOVERY_TEST_RUN"
HANG_DEADLINE_S = 2.0
LIMIT_S = 240.0
PRELOADS = {
    "torch": ["recipes_training.preload"],
    "megatron": ["recipes_training.megatron.preload_cpu", "recipes_training.recovery"],
}
SHARDINGS = {"ddp": ("none", None), "hybrid": ("hybrid", 2)}
BEGINNING = ("generation_opened", "process_group_ready", "rank_recovered", "rank_resumed")
"""What shows that a generation begins, in this order; the last of it only after another one."""
Faults = Sequence[dict[str, Any]]


def shipped_settings(option: str) -> dict[str, Any]:
    """Return what an option of a group of conf/resilience has."""
    text = (ROOT / "conf" / "resilience" / f"{option}.yaml").read_text()
    return dict(yaml.safe_load(text))


def make_fault_job(
    trainer: str = "ddp",
    *,
    max_steps: int,
    faults: Faults = (),
    num_nodes: int = 1,
    num_devices: int = 4,
    standby_nodes: int = 0,
    settings: dict[str, Any] | None = None,
    mmap: dict[str, Any] | None = None,
    elastic: dict[str, Any] | None = None,
    recovers: bool = True,
    **parts: Any,
) -> Job:
    """Return a job of four ranks whose learning rates do not depend on its number of steps."""
    all_settings = {
        **shipped_settings("checkpointless/default"),
        "transfer_buffer_mib": 8,
        "process_restarts_max": 1000,
        "standby_nodes": standby_nodes,
        "hang_deadline_s": HANG_DEADLINE_S,
        "join_deadline_s": 60,
        "last_save_deadline_s": 60,
        "self_check_every_n_steps": 1,
        **(settings or {}),
    }
    own = {
        "num_nodes": num_nodes,
        "num_devices": num_devices,
        "max_steps": max_steps,
        "optimizer": {"decay_steps": 400},
    }
    if trainer == "megatron":
        own = {**MEGATRON, **own, "num_replicas": 2}
        own["optimizer"] = {**MEGATRON["optimizer"], "decay_steps": 400}
    else:
        own["sharding"], own["num_replicas"] = SHARDINGS[trainer]
    resilience: dict[str, Any] = {
        "checkpointless": all_settings if recovers else None,
        "mmap": mmap,
        "elastic": elastic,
    }
    if faults:
        resilience["faults"] = {"injected": list(faults), "random": None}
    return make_job(
        trainer={**own, **parts.pop("values", {})},
        resources={"shm_gib": 1},
        resilience=resilience,
        **parts,
    )


@dataclass
class Run:
    """Agents at work."""

    folder: Path
    mark: str
    start_agent: Callable[[str], Process]
    agents: dict[str, Process] = field(default_factory=dict)

    def start_node(self, name: str) -> None:
        """Start the agent of a node."""
        self.agents[name] = self.start_agent(name)

    def events(self) -> Iterator[Event]:
        """Yield events as they are written, until every agent has ended."""
        reader = EventReader(self.folder / "events.jsonl")
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            is_over = all(each.poll() is not None for each in self.agents.values())
            yield from reader.read_new()
            if is_over:
                return
            with suppress(subprocess.TimeoutExpired):
                next(iter(self.agents.values())).wait(timeout=0.002)
        raise TimeoutError(f"the run has not ended within {LIMIT_S:g} s\n{self.log()}")

    def wait_for(self, is_it: Callable[[Event], bool]) -> Event:
        """Return the first event of which it is so."""
        for event in self.events():
            if is_it(event):
                return event
        raise AssertionError(f"the run has ended before\n{self.log()}")

    def wait_for_step(self, step: int) -> Event:
        return self.wait_for(lambda event: event.event == "step" and event.step == step)

    def wait(self) -> list[int]:
        """Return the agents' exit statuses."""
        for _ in self.events():
            pass
        return [each.returncode for each in self.agents.values()]

    def kill_node(self, name: str) -> None:
        """Kill an agent with all its processes, as a node that loses its power would."""
        self.signal_node(name, signal.SIGKILL)
        self.agents[name].wait(timeout=30)

    def signal_node(self, name: str, number: int) -> None:
        """Signal an agent and all its processes."""
        pids = processes_with(f"{MARK}={self.mark}", f"TEST_NODE={name}")
        assert pids
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_ranks(self, *ranks: int) -> None:
        """Kill the newest process of each rank."""
        events = read_events(self.folder / "events.jsonl")
        pids = {each.rank: each.fields["pid"] for each in events if each.event == "worker_started"}
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)

    def log(self) -> str:
        return "".join(path.read_text()[-6000:] for path in sorted(self.folder.glob("agent-*.log")))


@contextmanager
def start_run(
    folder: Path,
    job: Job,
    *,
    nodes: Sequence[str] = ("n0",),
    module: str = "recipes_training",
    by_node: Mapping[str, Mapping[str, str]] | None = None,
    network: Network | None = None,
    options: Sequence[str] = (),
    **env: str,
) -> Iterator[Run]:
    """Start an agent for each node; nothing of them is left when the block has ended.

    `by_node` and `env` are variables for one node and for all, `options` further ones of the
    agents. With a network, each node is on the
    host of its place in `nodes`; else all are on this one.
    """
    write_job(folder, job)
    places = dict(zip(nodes, _places(folder, len(nodes), network), strict=True))

    def start_agent(node: str) -> Process:
        # A further node of this host finds the run where the others do.
        words, where = places.get(node, places[nodes[0]])
        with (folder / f"agent-{node}.log").open("wb") as log:
            return start(
                [*words, *_command(folder, job, [*where, *options], node, module)],
                folder=ROOT,
                environment={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    **({} if network else {"GLOO_SOCKET_IFNAME": "lo"}),
                    MARK: run.mark,
                    "TEST_NODE": node,
                    **env,
                    **(by_node or {}).get(node, {}),
                },
                output=log,
                is_leader=True,
            )

    run = Run(folder, uuid.uuid4().hex, start_agent)
    try:
        for node in nodes:
            run.start_node(node)
        yield run
    finally:
        for pid in marked_processes(run.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in run.agents.values():
            agent.wait(timeout=30)


def _places(
    folder: Path, num_nodes: int, network: Network | None
) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Return what goes before the command of each agent, and which options say where it is."""
    if network is None:
        endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        return [((), ("--local-addr=127.0.0.1", f"--rdzv-endpoint={endpoint}"))] * num_nodes
    return [(network.words(host), network.agent_options(host, folder)) for host in range(num_nodes)]


def _command(folder: Path, job: Job, options: Sequence[str], node: str, module: str) -> list[str]:
    config = NodeConfig(agent=agent_config(job), memoryd=None)
    # Another node may be reading it.
    replace_text(folder / NODE_FILE, config.to_json(), node)
    return [
        "resilience.agent",
        f"--config={folder / NODE_FILE}",
        *options,
        f"--node-name={node}",
        f"--run-dir={folder}",
        *(f"--preload={each}" for each in PRELOADS[job.trainer.kind]),
        *(["--warm=program"] if job.resilience.checkpointless else []),
        *("--", "python", "-m", module),
        f"--job={folder}/job.json",
        f"--run-dir={folder}",
        f"--node-name={node}",
    ]


@dataclass(frozen=True)
class FaultOutcome(Outcome):
    """What a run under agents came to."""

    left_behind: tuple[str, ...] = ()

    def bits(self) -> dict[int, tuple[str, str]]:
        """Return loss and norm of each step; a step that was reported twice was the same."""
        found: dict[int, tuple[str, str]] = {}
        for each in self.named("step"):
            assert each.step is not None
            bits = (each.fields["loss"].hex(), each.fields["grad_norm"].hex())
            assert found.setdefault(each.step, bits) == bits, each
        return found

    def digests(self) -> dict[int | None, str]:
        """Return the digest of each rank's weights and moments at the end."""
        return {each.rank: each.fields["digest"] for each in self.named("state_digest")}


def finish(run: Run) -> FaultOutcome:
    """Wait for the end of a run, and look for what it has left."""
    statuses = run.wait()
    return FaultOutcome(run.folder, statuses, _left_behind(run))


def run_job(folder: Path, job: Job, **options: Any) -> FaultOutcome:
    """Run a job of one node to its end."""
    with start_run(folder, job, **options) as run:
        return finish(run)


def check_same(outcome: FaultOutcome, undisturbed: FaultOutcome, *, faults: Faults = ()) -> None:
    """Assert that the run went as the undisturbed one did, and lost no step."""
    log = "".join(path.read_text()[-4000:] for path in outcome.folder.glob("agent-*.log"))
    assert 0 in outcome.statuses, log
    assert set(outcome.statuses) <= {0, -signal.SIGKILL}, log
    check_same_bits(outcome, undisturbed)
    events = outcome.events
    assert not [each for each in events if each.event in ("recovery_fallback", "gave_up")]
    check_no_step_lost(events)
    check_order(events)
    fired = sorted((e.step, e.fields["place"]) for e in events if e.event == "fault_injected")
    expected = sorted((each["step"], each["place"]) for each in faults)
    # One that fires in a recovery knows the step that training goes on with.
    assert [p for _, p in fired if p != "recovery"] == [p for _, p in expected if p != "recovery"]
    assert len(fired) == len(expected)


def check_same_bits(outcome: FaultOutcome, undisturbed: FaultOutcome) -> None:
    """Assert that steps, weights and moments are those of the undisturbed run."""
    expected, found = undisturbed.bits(), outcome.bits()
    wrong = sorted(step for step in expected if found.get(step) != expected[step])
    assert not wrong, f"steps {wrong} differ: {found.get(wrong[0])}, {expected[wrong[0]]}"
    assert len(found) == len(expected)
    assert outcome.digests() == undisturbed.digests()
    assert len(outcome.digests()) == len({each.rank for each in outcome.named("worker_started")})
    assert outcome.weights() == undisturbed.weights()
    assert not outcome.left_behind


def check_no_step_lost(events: Sequence[Event]) -> None:
    """Assert that no generation began behind a step that was committed in the one before.

    By a node that is in the generation: one that nobody hears may have passed a gate alone, in
    whose midst the cut came, and the step is run again.
    """
    by_generation: dict[int, list[Event]] = defaultdict(list)
    for each in events:
        by_generation[each.generation].append(each)
    recovered = [each for each in events if each.event == "rank_recovered"]
    resumed = {each.generation: each for each in recovered}
    for number, begin in resumed.items():
        nodes = {each.node for each in recovered if each.generation == number}
        floor = max((_committed(by_generation[g], nodes) for g in range(number)), default=0)
        assert begin.step is not None
        assert begin.step >= floor, f"generation {number} began at {begin.step}, behind {floor}"


def check_order(events: Sequence[Event]) -> None:
    """Assert that each fault shows in the order that docs/recovery.md tells."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    by_rank: dict[tuple[int, int | None], list[Event]] = defaultdict(list)
    for each in events:
        times[each.event, each.generation].append(each.time)
        if each.event in BEGINNING:
            by_rank[each.generation, each.rank].append(each)
    opened = {number: at for (name, number), (at, *_) in times.items() if name == BEGINNING[0]}
    for name, number in list(times):
        if name == "generation_broken":
            then = min(at for at in opened if at > number)
            assert min(times["fault_detected", number]) <= min(times[name, number]) <= opened[then]
            assert max(times["rank_stopped", number], default=0.0) <= opened[then], number
    for (number, rank), begun in by_rank.items():
        if rank is not None:
            begun.sort(key=lambda each: each.time)
            assert opened[number] <= begun[0].time, begun
            assert tuple(each.event for each in begun) == BEGINNING[1 : 1 + len(begun)], begun
            assert len({each.step for each in begun if each.step is not None}) <= 1, begun


def _committed(events: Sequence[Event], nodes: Collection[str]) -> int:
    """Return how many updates somebody on these nodes who lived on had ended or could end."""
    corrupt = {
        each.rank
        for each in events
        if each.event == "fault_detected" and each.fields["reason"] == "corrupt"
    }
    stopped = [
        each
        for each in events
        if each.event == "rank_stopped" and each.rank not in corrupt and each.node in nodes
    ]
    return max(
        (each.step + (each.fields["phase"] == "passed") for each in stopped if each.step), default=0
    )


def marked_processes(mark: str, word: str = "") -> list[int]:
    """Return every process that was started on behalf of a run."""
    return processes_with(f"{MARK}={mark}", word=word)


def _left_behind(run: Run) -> tuple[str, ...]:
    """Return processes that outlive their agents by more than a moment, and unfinished files.

    Pages and arenas have no name, and sockets none but a port: both end with their processes.
    """
    deadline_s = time.monotonic() + 10
    while pids := marked_processes(run.mark):
        if time.monotonic() > deadline_s:
            break
        os.sched_yield()
    files = run.folder.glob("*.unfinished*")
    return (*map(str, pids), *map(str, files))
