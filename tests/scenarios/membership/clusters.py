"""Runs whose nodes are hosts of a network that a test cuts and heals."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.namespaces import Network
from resilience.events import Event, read_events
from tests.scenarios.membership.paced import HURRY, STEP_S
from tests.scenarios.membership.traces import check_one_world
from tests.scenarios.recovery.runs import (
    FaultOutcome,
    Run,
    check_no_step_lost,
    check_same_bits,
    finish,
    make_fault_job,
    start_run,
)

MakeNetwork = Callable[..., Network]
BATCHES = {"global_batch_size": 12, "micro_batch_size": 1}
"""Two, three and four ranks can share such a batch."""


@dataclass
class Cluster:
    """A run, with one rank on each of its nodes, and the network of these."""

    run: Run
    network: Network
    hurry: Path

    @property
    def nodes(self) -> list[str]:
        return list(self.run.agents)

    def events(self) -> list[Event]:
        return read_events(self.run.folder / "events.jsonl")

    def begin(self, step: int = 5) -> None:
        """Return once the run is under way."""
        self.run.wait_for_step(step)

    def coordinator(self) -> str:
        """Return the node whose agent has opened the newest generation."""
        return [each.node for each in self.events() if each.event == "generation_opened"][-1]

    def members(self) -> list[str]:
        """Return the nodes of the first generation, by rank."""
        started = [each for each in self.events() if each.event == "worker_started"]
        ranks = {each.rank or 0: each.node for each in reversed(started)}
        return [ranks[rank] for rank in sorted(ranks)]

    def choose(self, role: str) -> str:
        """Return the coordinator, or the last member beside it."""
        coordinator = self.coordinator()
        others = [node for node in self.members() if node != coordinator]
        return coordinator if role == "coordinator" else others[-1]

    # ---- troubles

    def cut(self, node: str) -> float:
        """Pull a node's cable; returns when."""
        self.network.cut(self.nodes.index(node))
        return time.time()

    def split(self, some: Collection[str]) -> float:
        """Let nothing pass between some nodes and the others; returns when."""
        hosts = {self.nodes.index(node) for node in some}
        self.network.split(hosts, set(range(len(self.nodes))) - hosts)
        return time.time()

    def heal(self) -> float:
        self.network.heal()
        return time.time()

    # ---- what comes of them

    def wait_for(self, event: str, since: float, is_it: Callable[[Event], bool]) -> Event:
        """Return the first such event after a moment."""
        return self.run.wait_for(
            lambda each: each.event == event and each.time > since and is_it(each)
        )

    def wait_for_generation(self, since: float) -> Event:
        """Return the opening of the next generation."""
        return self.wait_for("generation_opened", since, lambda each: True)

    def wait_for_return(self, nodes: Collection[str], since: float) -> None:
        """Return once those that were cut off, or those that they were cut off from, have come."""
        others = set(self.nodes) - set(nodes)

        def is_across(event: Event) -> bool:
            return (event.node in nodes) != (event.fields["node"] in nodes)

        came = self.wait_for("node_joined", since, is_across)
        for node in set(nodes) if came.fields["node"] in nodes else others:
            self.wait_for(
                "node_joined",
                since,
                lambda each, n=node: is_across(each) and each.fields["node"] == n,
            )

    def finish(self) -> FaultOutcome:
        """Return what the run came to, which takes no more time than it has to from here on."""
        self.hurry.touch()
        return finish(self.run)


@contextmanager
def start_cluster(
    folder: Path,
    network: Network,
    size: tuple[int, int],
    *,
    max_steps: int,
    step_s: float = 0.2,
    lease_s: float = 3.0,
) -> Iterator[Cluster]:
    """Start a run of nodes and standby nodes, each on a host of its own."""
    num_nodes, num_standby = size
    job = make_fault_job(
        max_steps=max_steps,
        num_nodes=num_nodes,
        num_devices=1,
        standby_nodes=num_standby,
        settings={
            "lease_s": lease_s,
            "spares_per_node": 0,
            # Only its silence tells of a node.
            "hang_deadline_s": 300,
            "join_deadline_s": 120,
        },
        values=BATCHES,
    )
    hurry = folder / "hurry"
    program = {"module": "tests.scenarios.membership.paced", HURRY: str(hurry), STEP_S: str(step_s)}
    nodes = [f"n{number}" for number in range(sum(size))]
    with start_run(folder, job, nodes=nodes, network=network, **program) as run:
        yield Cluster(run, network, hurry)


def check_outcome(outcome: FaultOutcome, undisturbed: FaultOutcome) -> None:
    """Assert that nothing was lost, in one world, with the bits of the undisturbed run."""
    events = outcome.events
    check_one_world(events)
    check_no_step_lost(events)
    assert not [each for each in events if each.event in ("recovery_fallback", "gave_up")]
    check_same_bits(outcome, undisturbed)
