"""A job as rendered for HyperPod, on two addresses of this machine, under a stand-in operator."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.events import Event, read_events
from tests.resilience.agent.operator.driver import Node, children
from tests.scenarios.local_runs.operator import Operator
from tests.scenarios.local_runs.pods import pods, run_folder


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Node]]:
    """Start the pods' script on each node."""
    with pods(tmp_path, *request.param) as found:
        yield found


def read_completed(nodes: list[Node]) -> list[Event]:
    """Return the run's events, once it has ended well on both nodes."""
    ends = [node.wait("completed", "faulted")["status"] for node in nodes]
    assert ends == ["completed", "completed"], nodes[0].run.show()
    return read_events(run_folder(nodes[0].run) / "events.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "nodes", [("llama/llama3_tiny_tiered", "trainer.max_steps=40")], indirect=True
)
def test_a_stop_keeps_the_step_in_memory_and_a_start_goes_on_from_it(nodes: list[Node]) -> None:
    operator = Operator(pods=nodes, nodes=nodes)
    operator.start()
    nodes[0].wait_for_step(4)
    operator.stop()
    operator.start()

    events = read_completed(nodes)
    stopped = {each.step for each in events if each.event == "worker_stopped" and each.step}
    (last,) = stopped
    loads = [each for each in events if each.event == "checkpoint_loaded"]
    assert [(each.step, each.fields["source"]) for each in loads] == [(last + 1, "ram")] * 2
    assert [node.end() for node in nodes] == [0, 0]


CHECKPOINTLESS = "llama/llama3_tiny_checkpointless", "resilience.faults=null"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(*CHECKPOINTLESS, "trainer.max_steps=200")], indirect=True)
def test_a_stop_without_a_lost_node_keeps_what_the_other_one_holds(nodes: list[Node]) -> None:
    operator = Operator(pods=nodes, nodes=nodes)
    operator.start()
    nodes[0].wait_for_step(20)
    (agent,) = children(nodes[1].run.agents["n1"].pid)
    os.kill(agent, signal.SIGKILL)
    nodes[1].wait("faulted")
    step = nodes[0].step()
    operator.stop()
    operator.start()

    loads = [each for each in read_completed(nodes) if each.event == "checkpoint_loaded"]

    assert [each.step is not None and each.step >= step for each in loads] == [True, True], loads
