"""A job as rendered for HyperPod, on two addresses of this machine, under a stand-in operator."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.events import Event, read_events
from tests.launcher.k8s_job import documents
from tests.launcher.shipped import shipped_job
from tests.ports import free_ports
from tests.resilience.agent.operator.driver import Node, children, start_body
from tests.resilience.agent.runs import Run
from tests.tokens import write_token

HOSTS = ("127.0.0.1", "127.0.0.2")
NAME = "operated"


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Node]]:
    """Start the pods' script on each node."""
    recipe, *changes = request.param
    job = shipped_job(recipe, "hyperpod", [
        f"cluster.run_path={tmp_path}/runs", "cluster.operator_from=[127.0.0.0/8]",
        f"run.name={NAME}", "trainer.num_devices=1", *changes,
    ])  # fmt: skip
    token, run, memories = write_token(tmp_path / "token"), Run(folder=tmp_path, port=0), []
    (tmp_path / "runs" / NAME).mkdir(parents=True)
    found = [Node(run=run, name=f"n{rank}", host=host) for rank, host in enumerate(HOSTS)]
    for node in found:
        folder = tmp_path / node.name
        folder.mkdir()
        for name, text in documents(job)["ConfigMap"]["data"].items():
            here = text.replace("/etc/training-token/token", str(token))
            here = here.replace("/etc/training", str(folder))
            (folder / name).write_text(here.replace("-port=8080", f"-port={node.port}"))
        memories.append(Path("/dev/shm") / f"operator-{node.port}")
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LAUNCHER_POD_IP": node.host,
            "LAUNCHER_K8S_NODE": node.name,
            "MEMORYD_DIR": str(memories[-1]),
            "MEMORYD_TOKEN_FILE": str(token),
        }
        with (tmp_path / f"{node.name}.txt").open("ab") as output:
            run.agents[node.name] = subprocess.Popen(
                ["sh", folder / "start.sh"],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
    yield found
    for agent in run.agents.values():
        agent.terminate()
        agent.wait(60)
    for memory in memories:
        shutil.rmtree(memory, ignore_errors=True)


def start_both(nodes: list[Node], port: int, count: int) -> None:
    for rank, node in enumerate(nodes):
        node.wait("ready")
        node.command("/start", start_body(rank, HOSTS, master_port=port, faultCount=count))


def stop_both(nodes: list[Node]) -> None:
    for node in nodes:
        node.command("/stop", {"is_graceful": True, "timeout": 60})


def read_completed(nodes: list[Node]) -> list[Event]:
    """Return the run's events, once it has ended well on both nodes."""
    ends = [node.wait("completed", "faulted")["status"] for node in nodes]
    assert ends == ["completed", "completed"], nodes[0].run.show()
    return read_events(nodes[0].run.folder / "runs" / NAME / "events.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "nodes", [("llama/llama3_tiny_tiered", "trainer.max_steps=40")], indirect=True
)
def test_a_stop_keeps_the_step_in_memory_and_a_start_goes_on_from_it(nodes: list[Node]) -> None:
    (port,) = free_ports(1)
    start_both(nodes, port, 0)
    nodes[0].wait_for_step(4)
    stop_both(nodes)
    start_both(nodes, port, 1)

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
    (port,) = free_ports(1)
    start_both(nodes, port, 0)
    nodes[0].wait_for_step(20)
    (agent,) = children(nodes[1].run.agents["n1"].pid)
    os.kill(agent, signal.SIGKILL)
    nodes[1].wait("faulted")
    step = nodes[0].step()
    stop_both(nodes)
    start_both(nodes, port, 1)

    loads = [each for each in read_completed(nodes) if each.event == "checkpoint_loaded"]

    assert [each.step is not None and each.step >= step for each in loads] == [True, True], loads
