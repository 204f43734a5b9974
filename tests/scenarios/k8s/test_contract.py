"""A real API server holds the contract of clusters, with pods whose states a test plays.

It has a controller of Jobs and no node: a pod is what its status says.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.clusters.k8s.manifest import MANIFEST
from launcher.clusters.k8s.objects import owner_of
from launcher.clusters.k8s.values import JOB_LABEL
from launcher.clusters.running.cluster import RunFolder, read_run_folder
from launcher.clusters.running.kubernetes import KubernetesRuns
from launcher.commands.sight import see_run
from launcher.errors import OutsideError
from launcher.monitor.standing import Phase
from launcher.rundir import write_files, write_submission
from tests.launcher.clusters.running.cluster_suite import ClusterContract, wait_for
from tests.launcher.command import launch
from tests.launcher.k8s_job import documents, k8s_job
from tests.scenarios.k8s.conftest import Asked, end_at_first_failure, wait_until

_numbers = itertools.count()


class KubernetesWorld(Asked):
    cluster = KubernetesRuns()
    has_queue = True
    remembers_deleted = False
    has_logs = False

    def __init__(self, config: Path, kind: str, folder: Path) -> None:
        super().__init__(config, folder)
        self._kind = kind

    def start(self, *, is_held: bool = False) -> RunFolder:
        job = k8s_job(self._kind, {"name": f"contract-{self._kind}-{next(_numbers)}"})
        found = documents(job)
        if self._kind == "job":
            end_at_first_failure(found["job"])
        del found["job"]
        path = self._folder / job.name
        text = "".join(f"---\n{json.dumps(each)}\n" for each in found.values())
        write_files(path, {"job.json": job.to_json(), MANIFEST: text})
        submission = self.cluster.submit(RunFolder(path=path, job=job))
        write_submission(path, dataclasses.asdict(submission))
        run = read_run_folder(path)
        if self._kind == "hyperpod":
            self._make_pods(run)
        self._await_pods(run, 2)
        return run

    def begin(self, run: RunFolder) -> None:
        self._play(run, {"phase": "Running"})

    def end(self, run: RunFolder, status: int) -> None:
        terminated = {"exitCode": status, "reason": "Error" if status else "Completed"}
        state = {"name": "node", "ready": False, "restartCount": 0, "image": "i", "imageID": "i"}
        phase = "Failed" if status else "Succeeded"
        container = {**state, "state": {"terminated": terminated}}
        # The controller of Jobs takes the others away.
        number = 1 if status and self._kind == "job" else 2
        self._play(run, {"phase": phase, "containerStatuses": [container]}, number)
        if self._kind == "hyperpod":
            condition = {"type": "Failed" if status else "Completed", "status": "True"}
            patch = json.dumps({"status": {"conditions": [condition]}})
            self.ask("patch", run.job_id, "--type=merge", f"--patch={patch}")

    def end_from_outside(self, run: RunFolder) -> None:
        self.ask("delete", run.job_id, "--wait=false")

    def forget(self, run: RunFolder) -> RunFolder:
        """Delete the job and make another of its name: its pods and its number are others."""
        self.ask("delete", run.job_id, "--wait=true", "--timeout=30s")
        return run

    @contextmanager
    def cut(self) -> Iterator[None]:
        config = json.loads(self.ask("config", "view", "--raw", "--output=json"))
        for each in config["clusters"]:
            each["cluster"]["server"] = "https://127.0.0.1:1"
        path = self._folder / "cut.json"
        path.write_text(json.dumps(config))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", str(path))
            yield

    def objects(self, run: RunFolder) -> list[str]:
        """Return all that is there of the run's name."""
        kinds = f"pods,services,configmaps,secrets,jobs,{run.job_id.partition('/')[0]}"
        names = self.ask("get", kinds, "--output=name").split()
        return sorted({name for name in names if run.job.name in name})

    def _make_pods(self, run: RunFolder) -> None:
        """Do what HyperPod's operator does, which AWS alone has."""
        job = json.loads(self.ask("get", run.job_id, "--output=json"))
        owner = {**owner_of(job), "blockOwnerDeletion": True}
        for index in range(2):
            own = {"name": f"{run.job.name}-{index}", "labels": {JOB_LABEL: run.job.name}}
            metadata = {**own, "ownerReferences": [owner]}
            spec = {"containers": [{"name": "node", "image": "image"}]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            self.ask("create", "--filename=-", text=json.dumps(pod))

    def _await_pods(self, run: RunFolder, number: int) -> list[str]:
        wait_until(lambda: len(self.pods(run)) == number)
        return self.pods(run)

    def _play(self, run: RunFolder, status: dict[str, Any], number: int = 2) -> None:
        for pod in self._await_pods(run, 2)[:number]:
            self.play(pod, **status)


class _Kubernetes(ClusterContract):
    kind = ""

    @pytest.fixture
    def world(
        self, kube_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> KubernetesWorld:
        monkeypatch.setenv("KUBECONFIG", str(kube_config))
        return KubernetesWorld(kube_config, self.kind, tmp_path)

    # Kubernetes may take half a minute to see that what a run owns is to go with it.
    @pytest.mark.parametrize("is_held", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_nothing_of_a_run_is_left_after_clean(
        self, world: KubernetesWorld, is_held: bool
    ) -> None:
        run = world.start()
        assert f"configmap/{run.job.name}" in world.objects(run)
        if not is_held:
            world.begin(run)
            assert launch("clean", str(run.path), folder=run.path).status == 2
            world.end(run, 7)
            wait_for(world, run, Phase.FAILED)

        cleaned = launch("clean", str(run.path), folder=run.path)

        assert (cleaned.status, cleaned.err) == (0, "")
        assert f"removed configmap/{run.job.name}\n" in cleaned.out
        assert world.objects(run) == []
        again = launch("clean", str(run.path), folder=run.path)
        assert "has left nothing beside" in again.out

    def test_objects_of_a_later_run_of_the_name_stay(self, world: KubernetesWorld) -> None:
        run = world.start()
        later = dataclasses.replace(run, submitted={**run.submitted, "uid": "of-before"})

        assert see_run(later, world.cluster).standing.phase is Phase.FORGOTTEN
        with pytest.raises(OutsideError, match="another run's"):
            world.cluster.clean(later)

        assert f"configmap/{run.job.name}" in world.objects(run)


class TestPlainJob(_Kubernetes):
    kind = "job"

    @pytest.mark.slow
    def test_objects_of_a_stranger_with_the_names_of_a_run_stay(
        self, world: KubernetesWorld
    ) -> None:
        run = world.start()
        names = [f"configmap/{run.job.name}", f"service/{run.job.name}"]
        world._ask("delete", *names)
        world._ask("create", "configmap", run.job.name)
        world._ask("create", "service", "clusterip", run.job.name, "--tcp=80")
        world.begin(run)
        world.end(run, 7)
        wait_for(world, run, Phase.FAILED)

        cleaned = launch("clean", str(run.path), folder=run.path)

        assert (cleaned.status, cleaned.err) == (0, "")
        assert world.objects(run) == sorted(names)

    @pytest.mark.slow
    def test_what_was_made_for_a_job_goes_with_it(self, world: KubernetesWorld) -> None:
        run = world.start()
        made = world.objects(run)
        assert {f"configmap/{run.job.name}", f"service/{run.job.name}"} <= set(made)
        assert any(name.startswith("secret/") for name in made)

        launch("cancel", str(run.path), folder=run.path)

        wait_until(lambda: not world.objects(run))


@pytest.mark.slow
class TestHyperPod(_Kubernetes):
    kind = "hyperpod"
