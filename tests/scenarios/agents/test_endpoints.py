"""Agents that see no common folder, and find each other by the addresses of all alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from resilience.agent.connections.transport import NO_AGENT
from resilience.events import Event, read_events
from tests.ports import free_ports
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, listening_ports, plan

JOB = ("--nproc-per-node", "1", "--spares", "0", "--lease-s", "1", "--join-deadline-s", "60")
NOT_STARTED = "pod-9.no-such-service.invalid:29500"
"""The address of a pod that has none yet."""


@dataclass(kw_only=True)
class RunApart(Run):
    """A run whose nodes have folders of their own."""

    def join(self, node: str, ports: Sequence[int], *options: str) -> None:
        """Start the agent of a node with the addresses that it is told."""
        addresses = [NOT_STARTED, *(f"127.0.0.1:{port}" for port in ports)]
        self.start(
            node,
            *(*JOB, *options),
            *("--run-dir", str(self.folder / f"of-{node}")),
            *("--rdzv-endpoint", ",".join(addresses)),
            variables=plan(fault("wait", "forward", 0, 2), NOTE=self.note),
        )

    def events(self) -> list[Event]:
        """Return the events in all folders."""
        found = []
        for folder in self.folder.glob("of-*"):
            with suppress(FileNotFoundError):
                found += read_events(folder / "events.jsonl")
        return sorted(found, key=lambda event: event.time)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[RunApart]:
    each = RunApart(folder=tmp_path, port=free_ports(1)[0])
    yield each
    each.end()


def own_port(run: Run, node: str, ports: Sequence[int]) -> int:
    """Return the one of the addresses' ports at which a node's agent listens."""
    (port,) = set(listening_ports(run.agents[node].pid)) & set(ports)
    return port


def test_node_whose_address_is_gone_for_good_finds_the_run_by_another_ones(
    apart: RunApart, undisturbed: Undisturbed
) -> None:
    """The first node of two is lost, and another machine takes its place under its name."""
    *ports, elsewhere = free_ports(3)
    for node in ("n0", "n1"):
        apart.join(node, ports, "--nnodes", "2")
    apart.wait_for_note()
    gone = own_port(apart, "n0", ports)
    assert {gone, own_port(apart, "n1", ports)} == set(ports)

    apart.kill("n0")
    apart.join("n0", [elsewhere if port == gone else port for port in ports], "--nnodes", "2")

    assert [apart.wait(node) for node in apart.agents] == [0, 0], apart.show()
    roles = {(rank, role) for generation, rank, role, _ in apart.resumed() if generation}
    assert roles == {(0, "repaired"), (1, "kept")}
    assert not list(apart.folder.glob("of-*/generations/*")), "a record in a folder of one node"
    apart.assert_same(undisturbed(2, 6))


def test_agent_beyond_the_nodes_of_a_run_says_so(run: Run) -> None:
    run.start("n0", *JOB, variables=plan(fault("wait", "forward", 0, 2), NOTE=run.note))
    run.wait_for_note()
    run.start("n1", *JOB)
    run.wait_for(lambda _: "the run has all its nodes (1); this one waits" in run.text("n1"))


def test_endpoint_of_another_program_ends_a_run_of_one_node(run: Run) -> None:
    with socket.create_server(("127.0.0.1", run.port)):
        run.start("n0", *JOB)
        assert run.wait() == 1, run.show()
    reason = f"127.0.0.1:{run.port}: {NO_AGENT}: it accepts the connection and stays silent"
    assert f"resilience.agent n0: {reason}" in run.text().splitlines()
    assert run.text().endswith(f" s; {reason}\n")
    assert "within 60 s" not in run.text(), "the deadline of those whose nodes may still come"


@pytest.mark.parametrize(
    ("has_endpoint", "options", "status", "words"),
    [
        pytest.param(True, ("--rdzv-id", "b"), 1, "an agent of another run is there", id="port"),
        pytest.param(False, ("--run-dir", "../a/run"), 2, "another agent is at work", id="folder"),
        pytest.param(False, (), 0, "", id="nothing-shared"),
    ],
)
def test_second_run_of_one_node_never_joins_the_first_one(
    tmp_path: Path, has_endpoint: bool, options: tuple[str, ...], status: int, words: str
) -> None:
    port = free_ports(1)[0] if has_endpoint else 0
    one, other = (Run(folder=tmp_path / name, port=port) for name in "ab")
    for run in (one, other):
        run.folder.mkdir()
    try:
        one.start("n0", *JOB, variables=plan(fault("wait", "forward", 0, 2), NOTE=one.note))
        one.wait_for_note()
        other.start("n1", *JOB, *options, variables=plan(STEPS=2))

        assert other.wait("n1") == status, other.show()
        assert words in other.text("n1").splitlines()[-1]
        assert bool(other.digests()) is (status == 0)
    finally:
        one.end()
        other.end()
