"""A job as rendered for HyperPod, on two addresses of this machine, under a stand-in operator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.events import read_events
from tests.launcher.k8s_job import documents
from tests.launcher.shipped import shipped_job
from tests.ports import free_ports
from tests.resilience.agent.operator.driver import Node, start_body
from tests.resilience.agent.runs import Run
from tests.tokens import write_token

HOSTS = ("127.0.0.1", "127.0.0.2")
NAME = "llama3-tiny-tiered"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Start the pods' script on each node."""
    job = shipped_job("llama/llama3_tiny_tiered", "hyperpod", [
        f"cluster.run_path={tmp_path}/runs", "cluster.operator_from=[127.0.0.0/8]",
        "trainer.max_steps=40", "trainer.num_devices=1",
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


@pytest.mark.slow
def test_a_stop_keeps_the_step_in_memory_and_a_start_goes_on_from_it(nodes: list[Node]) -> None:
    (port,) = free_ports(1)
    for count in (0, 1):
        for rank, node in enumerate(nodes):
            node.wait("ready")
            more = {"master_port": port, "faultCount": count}
            node.command("/start", start_body(rank, HOSTS, **more))
        if not count:
            nodes[0].wait_for_step(4)
            for node in nodes:
                node.command("/stop", {"is_graceful": True, "timeout": 60})

    ends = [node.wait("completed", "faulted")["status"] for node in nodes]

    assert ends == ["completed", "completed"], nodes[0].run.show()
    events = read_events(nodes[0].run.folder / "runs" / NAME / "events.jsonl")
    stopped = {each.step for each in events if each.event == "worker_stopped" and each.step}
    (last,) = stopped
    loads = [each for each in events if each.event == "checkpoint_loaded"]
    assert [(each.step, each.fields["source"]) for each in loads] == [(last + 1, "ram")] * 2
    assert [node.end() for node in nodes] == [0, 0]
