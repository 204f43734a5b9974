"""The pods of a job as rendered for HyperPod, each at an address of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launcher.k8s_job import documents
from tests.launcher.shipped import shipped_job
from tests.ports import free_ports
from tests.resilience.agent.operator.driver import Node
from tests.resilience.agent.runs import MARK, Run
from tests.tokens import write_token

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
NAME = "operated"


@contextmanager
def pods(
    folder: Path, recipe: str, *changes: str, num_nodes: int = 2, is_operated: bool = True
) -> Iterator[list[Node]]:
    """Start the pods' script on each node; nothing of them is left when the block has ended.

    Without an operator the agents begin the run by themselves.
    """
    job = shipped_job(recipe, "hyperpod", [
        f"cluster.run_path={folder}/runs", "cluster.operator_from=[127.0.0.0/8]",
        f"run.name={NAME}", "trainer.num_devices=1", *changes,
    ])  # fmt: skip
    token, run = write_token(folder / "token"), Run(folder=folder, port=0)
    peer_port, port = free_ports(2)
    endpoints = [f"{host}:{port}" for host in HOSTS[:num_nodes]]
    run_folder(run).mkdir(parents=True)
    (folder / "tmp").mkdir()
    texts = documents(job)["ConfigMap"]["data"]
    nodes = [Node(run=run, name=f"n{rank}", host=HOSTS[rank]) for rank in range(num_nodes)]
    try:
        for node in nodes:
            own = folder / node.name
            own.mkdir()
            for name, text in texts.items():
                here = text.replace("/etc/training-token/token", str(token))
                here = here.replace("/etc/training", str(own)).replace("=9201", f"={peer_port}")
                here = here.replace("-port=8080", f"-port={node.port}")
                (own / name).write_text(here if is_operated else _without_operator(here, endpoints))
            environment = {
                **os.environ, MARK: run.mark, "TMPDIR": str(folder / "tmp"),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "LAUNCHER_POD_IP": node.host, "LAUNCHER_K8S_NODE": node.name,
                "MEMORYD_DIR": str(memory_of(node)), "MEMORYD_TOKEN_FILE": str(token),
            }  # fmt: skip
            with (folder / f"{node.name}.txt").open("ab") as output:
                files = {"stdout": output, "stderr": output}
                command = ["sh", own / "start.sh"]
                run.agents[node.name] = subprocess.Popen(command, env=environment, **files)
        yield nodes
    finally:
        for agent in run.agents.values():
            agent.terminate()
        run.end()
        for node in nodes:
            shutil.rmtree(memory_of(node), ignore_errors=True)


def run_folder(run: Run) -> Path:
    return run.folder / "runs" / NAME


def memory_of(node: Node) -> Path:
    """Return the folder of the node's checkpoint daemon, in shared memory."""
    return Path("/dev/shm") / f"operator-{node.port}"


def _without_operator(script: str, endpoints: list[str]) -> str:
    """Return a pod's script with what the operator would have said."""
    told = f"--nnodes={len(endpoints)} --rdzv-endpoint={','.join(endpoints)} --rdzv-attempt=0"
    lines = [line for line in script.splitlines() if "--operator-" not in line]
    return "\n".join(lines).replace("resilience.agent ", f"resilience.agent {told} ", 1)
