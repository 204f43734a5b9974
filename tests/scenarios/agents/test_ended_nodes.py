"""A node that has ended for certain although it has not said so, and one that may live on."""

from __future__ import annotations

import os
import signal

import pytest

from tests.processes import stop, wait_for_end
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, plan

JOB = ("--nproc-per-node", "1", "--spares", "0", "--nnodes", "1", "--standby-nodes", "1")
TIMES = ("--lease-s", "1", "--join-deadline-s", "60")
SHORT = ("--partition-patience-s", "1")


def start_both(run: Run, kind: str, *options: str) -> int:
    """Start a node and its standby; returns the node's worker, which has come to its place."""
    for node in ("n0", "n1"):
        place = fault(kind, "forward", 0, 2)
        run.start(node, *JOB, *TIMES, *options, variables=plan(place, NOTE=run.note))
        run.wait_for(lambda event, node=node: event.fields.get("node") == node)  # type: ignore[misc]
    run.wait_for_note()
    worker = run.children("n0")[-1]
    if kind == "outlive":
        # It stops by itself just after its note; until then it would end with its agent.
        stop(worker)
    return worker


def kill(run: Run, node: str) -> None:
    run.agents[node].kill()
    run.agents[node].wait()


def test_standby_alone_goes_on_without_a_node_whose_processes_have_ended(
    run: Run, undisturbed: Undisturbed
) -> None:
    """Nobody starts the node again; all the same the standby does not wait for it."""
    start_both(run, "wait")

    kill(run, "n0")

    assert run.wait("n1") == 0, run.show()
    assert set(run.digests().values()) == {undisturbed(1, 6)}
    (ended,) = [event for event in run.events() if event.event == "node_ended"]
    assert ended.fields == {
        "node": "n0",
        "reason": "all its processes on this machine have ended",
    }
    run.assert_nothing_left()


def test_node_whose_worker_lives_on_has_not_ended(run: Run) -> None:
    worker = start_both(run, "outlive", *SHORT)

    kill(run, "n0")

    assert run.wait("n1") == 75, run.show()
    assert "none came and n0 did not within 2 s" in run.text("n1")
    os.kill(worker, signal.SIGKILL)
    run.assert_nothing_left()


def test_agent_that_stands_still_has_not_ended(run: Run, undisturbed: Undisturbed) -> None:
    start_both(run, "wait", *SHORT)

    run.agents["n0"].send_signal(signal.SIGSTOP)
    assert run.wait("n1") == 75, run.show()
    run.agents["n0"].send_signal(signal.SIGCONT)
    run.agents["n0"].send_signal(signal.SIGTERM)

    assert run.wait("n0") == 128 + signal.SIGTERM, run.show()
    assert not [event for event in run.events() if event.event == "node_ended"]
    run.assert_nothing_left()


@pytest.mark.slow
def test_stopped_processes_without_a_rank_are_replaced_before_a_rank_needs_them(
    run: Run, undisturbed: Undisturbed
) -> None:
    """A spare, the process that forks workers, and a worker of a standby node."""
    job = (*JOB[:2], "--spares", "1", *JOB[4:], *TIMES)
    for node in ("n0", "n1"):
        run.start(node, *job, variables=plan(fault("wait", "forward", 0, 2), NOTE=run.note))
        run.wait_for(lambda event, node=node: event.fields.get("node") == node)  # type: ignore[misc]
    worker = run.wait_for_note()
    # Of the two that are forked at once, the first that is ready has the rank.
    zygote, *processes = run.children("n0")
    (spare,) = set(processes) - {worker}
    idle = run.children("n1")[1]

    for pid in (zygote, spare, idle):
        stop(pid)
    for words in (
        f"process {spare},",
        "the process that forks workers has been",
        f"process {idle},",
    ):
        run.wait_for(lambda event, words=words: words in str(event.fields.get("text")))  # type: ignore[misc]
    for pid in (zygote, spare, idle):
        wait_for_end(pid)
    kill(run, "n0")

    assert run.wait("n1") == 0, run.show()
    assert set(run.digests().values()) == {undisturbed(1, 6)}
    run.assert_nothing_left()


def test_platform_says_that_a_node_is_off(run: Run, undisturbed: Undisturbed) -> None:
    script = run.folder / "state of a node"
    script.write_text('#!/bin/sh\n[ "$*" = "-x n0" ] && echo off\n')
    script.chmod(0o755)
    worker = start_both(run, "outlive", "--node-state-command", f"'{script}' -x")

    kill(run, "n0")

    assert run.wait("n1") == 0, run.show()
    assert set(run.digests().values()) == {undisturbed(1, 6)}
    (ended,) = [event for event in run.events() if event.event == "node_ended"]
    assert ended.fields == {"node": "n0", "reason": "its node is off"}
    assert "resilience.agent n1: node n0 has ended: its node is off" in run.text("n1")
    os.kill(worker, signal.SIGKILL)
    run.assert_nothing_left()
