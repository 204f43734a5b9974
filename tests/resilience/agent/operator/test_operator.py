"""Real agents under a stand-in operator, with real processes that really die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cases import slow
from tests.ports import free_ports
from tests.processes import descendants, wait_for_end
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.operator.driver import Node, call, children, start_body
from tests.resilience.agent.runs import Run, fault, plan

RANKS = ("--nproc-per-node", "2")
LONG = {"STEPS": 10_000, "STEP_S": 0.05, "ORDERLY": "1"}
HOSTS = ("127.0.0.1", "127.0.0.2")
(PORT,) = free_ports(1)


def begin_long(node: Node, *options: str, **variables: object) -> None:
    """Begin a run that ends only where it is asked to, and wait until it has taken steps."""
    node.begin(*RANKS, *options, variables=long_plan(node, **variables))
    node.command("/start", start_body())
    node.wait_for_step(2)


def start_all(nodes: Sequence[Node], **more: object) -> None:
    for rank, node in enumerate(nodes):
        node.command("/start", start_body(rank, HOSTS, master_port=PORT, **more))


def long_plan(node: Node, **variables: object) -> dict[str, str]:
    events = node.run.folder / "run" / "events.jsonl"
    return plan(**{**LONG, "EVENTS": events, **variables})


def test_the_operator_never_notices_an_exception_and_a_killed_worker(
    node: Node, undisturbed: Undisturbed
) -> None:
    faults = plan(fault("raise", "forward", 1, 2), fault("kill", "reduce", 0, 3), STEPS=6)
    node.begin(*RANKS, variables=faults)

    node.command("/start", start_body())
    last = node.wait("completed", "faulted")

    assert node.run.happened() == [0, 1], node.run.show()
    assert node.seen == ["ready", "running", "completed"]
    (progress,) = last["progress"].values()
    assert progress["progressData"] == str(node.run.folder / "run")
    assert 2 <= progress["progressCount"] <= 5
    # It stays until the operator lets it go.
    assert node.run.agents["n0"].poll() is None
    assert node.end() == 0
    node.run.assert_same(undisturbed(2, 6))


def test_a_run_that_gives_up_is_faulted_and_started_again(
    node: Node, undisturbed: Undisturbed
) -> None:
    node.begin(*RANKS, variables=plan(fault("fatal", "forward", 1, 2), STEPS=6))
    node.command("/start", start_body())
    last = node.wait("faulted")

    assert last["reason"] == "WorkerCrash"
    assert "rank 1: FatalError: cannot be mended" in last["message"]
    assert call(node.port, "/start", start_body(faultCount=1))[0] == 409
    node.command("/stop")
    node.wait("ready", limit_s=5)
    node.command("/start", start_body(faultCount=1))
    node.wait("completed", "faulted")

    assert list(node.status()["transitions"]) == [
        "INIT", "FAULTED", "STOPPING", "READY", "RUNNING", "COMPLETED"
    ]  # fmt: skip
    assert node.end() == 0
    node.run.assert_same(undisturbed(2, 6))


def test_workers_that_ignore_a_stop_are_gone_by_its_timeout(node: Node) -> None:
    begin_long(node, "--grace-s", "60", STUBBORN="1", ORDERLY="")
    before = descendants(node.run.agents["n0"].pid)

    at_s = node.command("/stop", {"is_graceful": True, "timeout": 2})
    node.wait("ready")

    assert 2 <= time.monotonic() - at_s < 8
    assert [pid for pid in before if Path(f"/proc/{pid}").exists()] == []
    assert node.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGHUP)])
def test_a_signal_ends_the_run_in_order_and_the_agent(node: Node, number: int) -> None:
    begin_long(node)

    node.run.agents["n0"].send_signal(number)

    assert node.run.wait() == 143
    node.run.assert_nothing_left()


def test_a_killed_agent_of_a_run_is_a_fault_and_takes_its_workers_along(node: Node) -> None:
    begin_long(node)
    before = descendants(node.run.agents["n0"].pid)
    (agent,) = children(node.run.agents["n0"].pid)

    os.kill(agent, signal.SIGKILL)
    last = node.wait("faulted")

    assert (last["reason"], last["message"]) == (
        "WorkerFault",
        "the agent of the run was killed by SIGKILL",
    )
    assert [pid for pid in before if Path(f"/proc/{pid}").exists()] == []
    assert node.end() == 137


def test_a_run_folder_that_is_a_file_is_named_in_the_fault(node: Node) -> None:
    node.begin()
    (node.run.folder / "run").touch()

    node.command("/start", start_body())

    assert "cannot write to --run-dir" in node.wait("faulted")["message"]
    assert node.end() == 1


def test_sizes_that_a_run_with_recovery_cannot_have_are_refused(node: Node) -> None:
    node.begin("--nnodes=2:4", "--size=2", "--size=4")

    status, answer = call(node.port, "/start", start_body(nnodes=3))

    assert (status, node.status()["status"]) == (409, "ready")
    assert answer["detail"] == "nnodes is 3; allowed by the agent's options: [2, 4]"
    assert node.end() == 0


def test_a_lower_fault_count_is_refused_by_both_nodes_at_once(nodes: list[Node]) -> None:
    for node in nodes:
        node.begin(variables=plan(STEPS=3))
    for count, state in ((2, "completed"), (0, "faulted"), (2, "completed")):
        start_all(nodes, faultCount=count)
        for node in nodes:
            last = node.wait("completed", "faulted")
            assert last["status"] == state, node.run.show()
            if not count:
                refused = "attempt 0 of the run is refused: its folder has seen attempt 2; allowed"
                assert refused in last["message"]
            node.command("/stop")
        for node in nodes:
            node.wait("ready")
    assert [node.end() for node in nodes] == [0, 0]


def test_what_answers_the_operator_leaves_no_run_behind(node: Node) -> None:
    begin_long(node)
    before = descendants(node.run.agents["n0"].pid)

    node.run.kill("n0")

    for pid in before:
        wait_for_end(pid)
    node.run.assert_nothing_left()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes of one machine, with an address each."""
    run = Run(folder=tmp_path, port=0)
    yield [Node(run=run, name=f"n{rank}", host=host) for rank, host in enumerate(HOSTS)]
    run.end()


def test_a_stop_of_one_node_ends_both_in_order(nodes: list[Node]) -> None:
    """The operator stops one node after the other, and neither has a fault meanwhile."""
    first, second = nodes
    for node in nodes:
        node.begin(variables=long_plan(node))
    start_all(nodes)
    for node in nodes:
        node.wait_for_step(2)

    first.command("/stop", {"is_graceful": True, "timeout": 20})
    first.wait("ready")
    assert second.wait("running", "faulted")["status"] == "running"
    second.command("/stop", {"is_graceful": True, "timeout": 20})
    second.wait("ready", limit_s=10)

    start_all(nodes, faultCount=1)
    for node in nodes:
        node.wait_for_step(1)
    assert [node.end() for node in nodes] == [143, 143]
    first.run.assert_nothing_left()


def test_two_nodes_end_with_the_bits_of_one_without_faults(
    nodes: list[Node], undisturbed: Undisturbed
) -> None:
    faults = plan(fault("kill", "reduce", 1, 2), STEPS=6)
    for node in nodes:
        node.begin(variables=faults)
    start_all(nodes)

    for node in nodes:
        node.wait("completed", "faulted")

    assert ["faulted" in node.seen for node in nodes] == [False, False]
    assert [node.end() for node in nodes] == [0, 0]
    nodes[0].run.assert_same(undisturbed(2, 6))


def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The operator has started it as one, and need not do anything for it."""
    hosts = (*HOSTS, "127.0.0.3")
    run, (port,) = Run(folder=tmp_path, port=0), free_ports(1)
    nodes = [Node(run=run, name=f"n{rank}", host=host) for rank, host in enumerate(hosts)]
    for node in nodes:
        node.begin(
            variables={**plan(fault("wait", "forward", 1, 3), STEPS=6), "NOTE": str(run.note)}
        )
    for rank, node in enumerate(nodes):
        more = {"nnodes": 2, "master_port": port, "spare": rank == 2}
        node.command("/start", start_body(rank, hosts, **more))

    run.wait_for_note()
    run.kill("n1")
    ends = [node.wait("completed", "faulted") for node in (nodes[0], nodes[2])]

    assert [each["status"] for each in ends] == ["completed", "completed"], run.show()
    assert [node.end() for node in (nodes[0], nodes[2])] == [0, 0]
    run.assert_same(undisturbed(2, 6))
