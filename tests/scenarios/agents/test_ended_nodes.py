"""A node that has ended for certain although it has not said so, and one that may live on."""

from __future__ import annotations

import os
import signal

from tests.processes import stop
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


def test_standby_alone_goes_on_without_a_node_whose_processes_have_ended(
    run: Run, undisturbed: Undisturbed
) -> None:
    """Nobody starts the node again; all the same the standby does not wait for it."""
    start_both(run, "wait")

    run.kill("n0")

    assert run.wait("n1") == 0, run.show()
    (ended,) = [event for event in run.events() if event.event == "node_ended"]
    assert ended.fields == {
        "node": "n0",
        "reason": "all its processes on this machine have ended",
    }
    run.assert_same(undisturbed(1, 6))


def test_node_whose_worker_lives_on_has_not_ended(run: Run) -> None:
    worker = start_both(run, "outlive", *SHORT)

    run.kill("n0")

    assert run.wait("n1") == 75, run.show()
    assert "none came and n0 did not within 2 s" in run.text("n1")
    os.kill(worker, signal.SIGKILL)
    run.assert_nothing_left()


def test_platform_says_that_a_node_is_off(run: Run, undisturbed: Undisturbed) -> None:
    script = run.folder / "state of a node"
    script.write_text('#!/bin/sh\n[ "$*" = "-x n0" ] && echo off\n')
    script.chmod(0o755)
    worker = start_both(run, "outlive", "--node-state-command", f"'{script}' -x")

    run.kill("n0")

    assert run.wait("n1") == 0, run.show()
    assert set(run.digests().values()) == {undisturbed(1, 6)}
    (ended,) = [event for event in run.events() if event.event == "node_ended"]
    assert ended.fields == {"node": "n0", "reason": "its node is off"}
    assert "resilience.agent n1: node n0 has ended: its node is off" in run.text("n1")
    os.kill(worker, signal.SIGKILL)
    run.assert_nothing_left()
