"""Pods of an elastic run's Jobs, as processes of this machine: they are one run.

Each runs the script of its manifest with the variables of its container. What else a pod has of
Kubernetes, a name and an address of its own, is what the run's folder tells here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.k8s.check import indexed_job, read_documents
from launcher.clusters.k8s.growth import growth_job
from launcher.job import Job
from resilience.event_files import event_files
from resilience.events import Event, read_events
from tests.launcher.k8s_job import documents, manifest
from tests.launcher.shipped import untiered_job
from tests.ports import free_ports
from tests.tokens import write_token
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
UID = "11-22"
LIMIT_S = 200.0


class Pods:
    """The pods of a run, by the index of the node."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.run_dir = folder / "runs" / job.name
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._base = indexed_job(read_documents(manifest(job)))
        (folder / "etc-token").mkdir()
        write_token(folder / "etc-token/token")
        (folder / "etc").mkdir()
        for name, text in documents(job)["ConfigMap"]["data"].items():
            (folder / "etc" / name).write_text(text.replace("/etc/training", f"{folder}/etc"))

    def start(self, index: int) -> None:
        """Start the pod of the run's own Job, 0, or that of a growth Job."""
        job = growth_job(self._base, index, UID) if index else self._base
        fields = {"LAUNCHER_POD_IP": "127.0.0.1", "LAUNCHER_POD_NAME": f"pod-{index}"}
        # An Indexed Job gives its pods these.
        own = {} if index else {"LAUNCHER_JOB_UID": UID, "JOB_COMPLETION_INDEX": "0"}
        with self.log(index).open("ab") as log:
            self.pods[index] = subprocess.Popen(
                ["sh", self._folder / "etc/start.sh"],
                env={**_values(job), **fields, **own, "PATH": os.environ["PATH"],
                     "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def log(self, index: int) -> Path:
        return self._folder / f"pod-{index}.log"

    def events(self) -> list[Event]:
        path = self.run_dir / "events.jsonl"
        return read_events(path) if event_files(path) else []

    def sizes(self) -> list[int]:
        opened = [each for each in self.events() if each.event == "generation_opened"]
        return [each.fields["world_size"] for each in opened]

    def wait_for_size(self, size: int) -> None:
        wait_until(
            lambda: self.sizes()[-1:] == [size] or self.pods[0].poll() is not None,
            self.show,
            limit_s=LIMIT_S,
        )
        assert self.sizes()[-1:] == [size], self.show()

    def wait(self, index: int) -> int:
        return self.pods[index].wait(LIMIT_S)

    def show(self) -> str:
        return "\n".join(f"--- {each}\n{self.log(each).read_text()}" for each in self.pods)


def _values(job: dict[str, Any]) -> dict[str, str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    return {name: value.replace("$$", "$") for name, value in values.items() if value}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    (port,) = free_ports(1)
    job = untiered_job("llama/llama3_tiny_elastic", "job", [
        f"cluster.run_path={tmp_path}/runs", f"cluster.rdzv_port={port}",
        f"cluster.python={sys.executable}", "trainer.max_steps=50000",
        "resilience.elastic.may_lose_steps=true",
    ])  # fmt: skip
    found = Pods(tmp_path, job)
    yield found
    for pod in found.pods.values():
        if pod.poll() is None:
            os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()


@pytest.mark.slow
def test_nodes_of_growth_jobs_join_the_run_and_leave_it(pods: Pods) -> None:
    """Three nodes; one is deleted, another one is created; then the run is cancelled."""
    for index in range(3):
        pods.start(index)
    pods.wait_for_size(3)

    pods.pods[2].send_signal(signal.SIGTERM)
    assert pods.wait(2) == 143, pods.show()
    pods.wait_for_size(2)
    pods.start(3)
    pods.wait_for_size(3)
    # As a cluster does when all Jobs of the run are deleted, further nodes' a while later.
    for index in (0, 1, 3):
        pods.pods[index].send_signal(signal.SIGTERM)
        time.sleep(0.3)

    assert [pods.wait(index) for index in (0, 1, 3)] == [143] * 3, pods.show()
    assert pods.sizes() == [3, 2, 3], "it became smaller before it stopped"
    steps = [each.step for each in pods.events() if each.event == "step" and each.rank == 0]
    assert sorted(set(steps)) == list(range(max(steps) + 1))
    # A node whose machine comes only now has nothing to do, and begins nothing.
    num_events = len(pods.events())
    pods.start(2)
    assert pods.wait(2) == 143, pods.show()
    last = pods.log(2).read_text().splitlines()[-1]
    assert last == "resilience.agent: the run has ended with exit status 143 without this node"
    assert len(pods.events()) == num_events
