"""Agents that stand still, and nodes that come back."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, plan

JOB = ("--nproc-per-node", "1", "--spares", "0", "--lease-s", "1", "--join-deadline-s", "60")
PLACE = fault("wait", "forward", 0, 2)


def start(run: Run, node: str, num_nodes: int, num_standby: int = 0) -> None:
    options = (*JOB, "--nnodes", str(num_nodes), "--standby-nodes", str(num_standby))
    run.start(node, *options, variables=plan(PLACE, NOTE=run.note))


def coordinator(run: Run) -> str:
    """Return the node whose agent has opened the first generation."""
    return next(event.node for event in run.events() if event.event == "generation_opened")


@pytest.mark.parametrize("is_coordinator", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_agent_that_stands_still_is_a_member_again(
    run: Run, undisturbed: Undisturbed, is_coordinator: bool
) -> None:
    for node in ("n0", "n1"):
        start(run, node, 2)
    run.wait_for_note()
    (still,) = (node for node in run.agents if (node == coordinator(run)) == is_coordinator)

    run.agents[still].send_signal(signal.SIGSTOP)
    missed = "coordinator_replaced" if is_coordinator else "node_lost"
    run.wait_for(lambda event: event.event == missed)
    run.agents[still].send_signal(signal.SIGCONT)

    assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
    roles = {(rank, role) for generation, rank, role, _ in run.resumed() if generation}
    # Rank 0 waits where nothing reaches it, until it is replaced.
    assert roles == {(0, "repaired"), (1, "kept")}
    run.assert_same(undisturbed(2, 6))


def test_node_comes_back_to_the_address_at_which_the_others_found_it(
    run: Run, undisturbed: Undisturbed
) -> None:
    """It founds no run of its own beside the one that holds the state."""
    start(run, "n0", 2)
    run.wait_for(lambda event: event.event == "node_joined")
    start(run, "n1", 2)
    run.wait_for_note()

    run.kill("n0")
    start(run, "n0", 2)

    assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
    roles = {(rank, role) for generation, rank, role, _ in run.resumed() if generation}
    assert roles == {(0, "repaired"), (1, "kept")}
    run.assert_same(undisturbed(2, 6))


def test_only_node_that_comes_back_begins_one_run_with_its_standby(
    run: Run, undisturbed: Undisturbed
) -> None:
    start(run, "n0", 1, 1)
    run.wait_for(lambda event: event.event == "node_joined")
    start(run, "n1", 1, 1)
    run.wait_for_note()

    run.kill("n0")
    # By then the standby node may have ended the run, and this one begins another.
    start(run, "n0", 1)

    assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
    opened = [event for event in run.events() if event.event == "generation_opened"]
    numbers = [int(event.fields["number"]) for event in opened]
    assert numbers == sorted(set(numbers)), "a number was given twice"
    run.assert_same(undisturbed(1, 6))


def test_all_nodes_that_come_back_begin_the_run_anew(run: Run, undisturbed: Undisturbed) -> None:
    for node in ("n0", "n1"):
        start(run, node, 2)
    run.wait_for_note()

    for agent in run.agents.values():
        agent.kill()
        agent.wait()
    for node in ("n0", "n1"):
        start(run, node, 2)

    assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
    opened = [event for event in run.events() if event.event == "generation_opened"]
    assert [int(event.fields["number"]) for event in opened][1] >= 100
    run.assert_same(undisturbed(2, 6))


def test_node_that_stands_still_for_longer_than_its_deadlines_has_no_fault(run: Run) -> None:
    """A virtual machine that moves, a container that is frozen: its agent is the first to go on."""
    deadlines = ("--hang-deadline-s", "1", "--lease-s", "1")
    log = {"EVENTS": str(run.folder / "run" / "events.jsonl"), "STEP_S": "0.05", "STEPS": "30"}
    run.start("n0", "--nproc-per-node", "2", *deadlines, variables=log)
    run.wait_for(lambda event: event.event == "step" and event.step == 3)

    processes = run.processes()
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2)
    for pid in sorted(processes, key=lambda each: each != run.agents["n0"].pid):
        os.kill(pid, signal.SIGCONT)

    assert run.wait() == 0, run.show()
    steps = [event.step for event in run.events() if event.event == "step"]
    assert steps == list(range(30))
    assert "fault_detected" not in {event.event for event in run.events()}


def test_a_nodes_workers_that_go_on_after_its_agent_keep_what_they_hold(run: Run) -> None:
    """The others have gone on to the next generation, or wait: the agent is told so at once."""
    log = {"EVENTS": str(run.folder / "run" / "events.jsonl"), "STEP_S": "0.05", "STEPS": "30"}
    for node in ("n0", "n1"):
        run.start(node, *JOB, "--nnodes", "2", variables=log)
    run.wait_for(lambda event: event.event == "step" and event.step == 3)
    still = coordinator(run)
    processes = [run.agents[still].pid, *run.children(still)]

    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    run.wait_for(lambda event: event.event == "coordinator_replaced")
    before = len(run.events())
    os.kill(processes[0], signal.SIGCONT)
    run.wait_for(lambda event: event in run.events()[before:] and event.event == "node_joined")
    for pid in processes[1:]:
        os.kill(pid, signal.SIGCONT)

    assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
    roles = {(rank, role) for generation, rank, role, _ in run.resumed() if generation}
    assert roles == {(0, "kept"), (1, "kept")}
    assert "worker_replaced" not in {event.event for event in run.events()}


def test_another_run_begins_in_the_folder_of_one_that_was_asked_to_end(
    run: Run, undisturbed: Undisturbed
) -> None:
    """As a Kubernetes Job that is deleted and created again: it does not wait for silence."""
    run.start("n0", *JOB, "--rdzv-id", "first", variables=plan(PLACE, NOTE=run.note))
    run.wait_for_note()
    run.agents["n0"].terminate()
    assert run.wait() == 143, run.show()

    run.start("n1", *JOB, "--rdzv-id", "second", variables=plan())

    assert run.wait("n1") == 0, run.show()
    opened = [event for event in run.events() if event.event == "generation_opened"]
    assert [int(event.fields["number"]) for event in opened] == [0, 1]
    run.assert_same(undisturbed(1, 6))
