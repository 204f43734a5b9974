"""A stand-in operator that starts, watches, stops and resizes a run, and brings faults upon it.

As HyperPod's does, it asks every node for its state, and where one is faulted it stops all and
starts all again, with the next fault count.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from resilience.events import Event, read_events
from tests.ports import free_ports
from tests.resilience.agent.operator.driver import Node, children, start_body
from tests.scenarios.local_runs.pods import run_folder
from tests.waiting import wait_until

KINDS = ("exception", "sigkill", "sigstop", "lost_agent", "give_up", "stop")
PLACES = ("forward", "backward", "reduction", "gate", "before_update", "within_update")
REASONS = {"lost_agent": "WorkerFault", "give_up": "WorkerCrash"}
"""Reason of FAULTED for each kind that the operator sees."""
_NUM_LOSSES = 5
"""Of one rank in one step, after which a run gives up: its `restarts_without_progress_max` is 3."""
_LIMIT_S = 500.0


@dataclass(frozen=True, kw_only=True)
class Act:
    """Something that befalls a run at a step."""

    kind: str
    step: int
    rank: int = 0
    place: str = "forward"
    seconds: float = 0.0
    """Seconds for which a process is stopped."""
    size: int = 0
    """Of the run after a stop, 0 for the same."""

    def faults(self) -> list[dict[str, Any]]:
        """Return what the run itself does to bring it about."""
        number = {"exception": 1, "give_up": _NUM_LOSSES}.get(self.kind, 0)
        kind, place = ("exception", self.place) if number == 1 else ("sigkill", "forward")
        return [{"kind": kind, "place": place, "step": self.step, "rank": self.rank}] * number


def draw(seed: int) -> list[Act]:
    """Return two or three acts, the first of which takes turns."""
    random = Random(seed)
    kinds = [KINDS[seed % len(KINDS)], *random.choices(KINDS, k=random.choice((1, 1, 2)))]
    return [
        Act(kind=kind, step=4 + 35 * number + random.randrange(25), rank=random.randrange(2),
            place=random.choice(PLACES),
            seconds=random.choice((0.3, 1.0, 2.0, 8.0) if kind == "sigstop" else (0.0, 0.5, 3.0)))
        for number, kind in enumerate(kinds)
    ]  # fmt: skip


@dataclass(kw_only=True)
class Operator:
    """Drives the nodes of one run; those beyond the run's size are spares."""

    pods: list[Node]
    """All that there are, also those that the run does not have at its size."""
    nodes: list[Node]
    """Of the run, in the order of their ranks."""
    size: int = 2
    random: Random = field(default_factory=lambda: Random(0))
    num_starts: int = 0
    faults: list[str] = field(default_factory=list)
    """The reasons of the nodes' faults that were seen."""
    done: list[str] = field(default_factory=list)
    _port: int = field(default_factory=lambda: free_ports(1)[0])

    def start(self) -> None:
        """Start all nodes, once all are ready."""
        hosts = [node.host for node in self.nodes]
        for node in self.pods:
            node.wait("ready")
        for rank, node in self._in_any_order():
            more = {"nnodes": self.size, "spare": rank >= self.size, "faultCount": self.num_starts}
            node.command("/start", start_body(rank, hosts, master_port=self._port, **more))
        self.num_starts += 1

    def stop(self) -> None:
        body = self.random.choice(({}, {"is_graceful": True, "timeout": 60}))
        for _, node in self._in_any_order():
            node.command("/stop", body)

    def step(self) -> int:
        """Return the newest step that a node shows."""
        return max(node.step() for node in self.nodes)

    def drive(self, acts: Sequence[Act]) -> None:
        """Bring the acts about, and mend what is faulted, until the run has ended well."""
        waiting = list(acts)

        def is_over() -> bool:
            states = {node.status().get("status") for node in self.nodes}
            if "faulted" in states:
                self._mend()
            elif waiting and waiting[0].step <= self.step():
                self._do(waiting.pop(0))
            return states == {"completed"}

        wait_until(is_over, self.show, limit_s=_LIMIT_S, pause_s=0.02 if acts else 1.0)

    def show(self) -> str:
        seen = [(node.name, node.seen, node.status()) for node in self.nodes]
        return f"{self.done}\n{seen}\n{self.nodes[0].run.show()}"

    def _in_any_order(self) -> list[tuple[int, Node]]:
        return self.random.sample([*enumerate(self.nodes)], len(self.nodes))

    def _mend(self) -> None:
        """Stop and start all, once those that are about to fault have done so as well."""
        self._pause(self.random.choice((0.0, 0.5, 3.0)))
        found = {node.name: node.status() for node in self.nodes}
        lost = {name: each for name, each in found.items() if each.get("status") == "faulted"}
        self.faults += sorted({each["reason"] for each in lost.values()})
        self.done.append(f"mend {[*lost]}")
        self.stop()
        if len(lost) == 1 and self.random.random() < 0.5 and len(self.nodes) > self.size:
            # A faulted node is the spare from now on.
            self.nodes.sort(key=lambda node: node.name in lost)
        self.start()

    def _do(self, act: Act) -> None:
        self.done.append(f"{act.kind} {act.rank} at {self.step()}")
        match act.kind:
            case "sigkill":
                self._signal(self._worker(act.rank).fields["pid"], signal.SIGKILL)
            case "sigstop":
                worker = self._worker(act.rank).fields["pid"]
                self._signal(worker, signal.SIGSTOP)
                self._pause(act.seconds)
                self._signal(worker, signal.SIGCONT)
            case "lost_agent":
                host = self._worker(act.rank).node
                (node,) = (each for each in self.nodes if each.host == host)
                self._signal(children(node.run.agents[node.name].pid)[0], signal.SIGKILL)
                node.wait("faulted")
            case "stop":
                self.stop()
                if act.size:
                    self.size, self.nodes = act.size, self.pods[: act.size]
                self.start()

    def _worker(self, rank: int) -> Event:
        """Return what says where the newest process of a rank is."""
        events = read_events(run_folder(self.nodes[0].run) / "events.jsonl")
        return [each for each in events if (each.event, each.rank) == ("worker_started", rank)][-1]

    def _signal(self, pid: int, number: int) -> None:
        """Signal a process of the run, unless it has ended."""
        if pid in self.nodes[0].run.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pause(self, seconds: float) -> None:
        """Ask for states alone for a while."""
        end_s = time.monotonic() + seconds
        wait_until(lambda: [node.status() for node in self.nodes] and time.monotonic() >= end_s)
