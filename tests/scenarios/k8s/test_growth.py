"""An elastic run changes its size on a real API server, which has a controller of Jobs and no node.

What its agents do then is in tests/scenarios/elastic/test_elastic.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.clusters.k8s.check import indexed_job, read_documents
from launcher.clusters.k8s.growth import NODE_LABEL, OWNER_UID, growth_job
from launcher.clusters.k8s.kubectl import Kubectl
from launcher.clusters.k8s.manifest import GROWTH, MANIFEST
from launcher.clusters.k8s.values import JOB_LABEL
from launcher.clusters.running.cluster import RunFolder, read_run_folder
from launcher.clusters.running.kubernetes import KubernetesRuns
from launcher.commands.sight import see_run
from launcher.errors import OutsideError
from launcher.monitor.standing import Phase
from launcher.rundir import write_files, write_submission
from tests.launcher.command import Ended, launch
from tests.launcher.shipped import rendered, untiered_job
from tests.scenarios.k8s.conftest import Asked, end_at_first_failure, kubectl, wait_until

ELASTIC, TINY = "llama/llama3_tiny_elastic", "llama/llama3_tiny_pretrain"
_numbers = itertools.count()


class Api(Asked):
    """The cluster as a person sees it with kubectl, and a run there."""

    warning = ""
    """Of the last submission."""

    def submit(self, recipe: str = ELASTIC) -> RunFolder:
        """Submit a run of one node that trains with three, and may have four."""
        own = ["resilience.elastic.may_lose_steps=true"] if recipe == ELASTIC else []
        job = untiered_job(recipe, "job", [f"run.name=growth-{next(_numbers)}", *own])
        files = rendered(job)
        found = read_documents(files[MANIFEST])
        for each in (each for each in found if each["kind"] == "Job"):
            end_at_first_failure(each)
        files[MANIFEST] = yaml.safe_dump_all(found)
        if GROWTH in files:
            base = indexed_job(read_documents(files[MANIFEST]))
            jobs = [growth_job(base, index, OWNER_UID) for index in (1, 2)]
            files[GROWTH] = yaml.safe_dump_all(jobs)
        path = self._folder / job.name
        write_files(path, files)
        submission = KubernetesRuns().submit(RunFolder(path=path, job=job))
        self.warning = submission.warning
        write_submission(path, dataclasses.asdict(submission))
        return read_run_folder(path)

    def try_again(self, run: RunFolder) -> str:
        """Submit a run of the same name from another folder; returns how that is refused."""
        other = self._folder / f"other-than-{run.job.name}"
        shutil.copytree(run.path, other, dirs_exist_ok=True)
        with pytest.raises(OutsideError) as error:
            KubernetesRuns().submit(RunFolder(path=other, job=run.job))
        return str(error.value)

    def growth(self, run: RunFolder) -> dict[str, dict[str, Any]]:
        """Return the run's growth Jobs that stay, by the index of the node."""
        selector = f"--selector={JOB_LABEL}={run.job.name},{NODE_LABEL}"
        items = json.loads(self.ask("get", "jobs", selector, "--output=json"))["items"]
        return {
            each["metadata"]["labels"][NODE_LABEL]: each
            for each in items
            if not each["metadata"].get("deletionTimestamp")
        }

    def uids(self, run: RunFolder) -> dict[str, str]:
        return {index: each["metadata"]["uid"] for index, each in self.growth(run).items()}


NO_LISTS = """#!/bin/sh
case "$*" in
  *"create --filename=-"*)
    text=$(cat)
    case "$text" in *'"List"'*) echo "etcdserver: request timed out" >&2; exit 1 ;; esac
    printf "%s" "$text" | exec {kubectl} "$@" ;;
  *) exec {kubectl} "$@" ;;
esac
"""
"""A kubectl that creates what a file has, but no list."""


def scale(run: RunFolder, nodes: object) -> Ended:
    return launch("scale", str(run.path), f"nodes={nodes}", folder=run.path)


@pytest.fixture
def api(kube_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setenv("KUBECONFIG", str(kube_config))
    yield Api(kube_config, tmp_path)
    for each in sorted(tmp_path.glob("growth-*")):
        kubectl(kube_config, "delete", "jobs", "--ignore-not-found", "--wait=false",
                f"--selector=app.kubernetes.io/name={each.name}")  # fmt: skip


def test_a_run_begins_with_a_job_of_the_fewest_nodes_and_one_for_each_further(api: Api) -> None:
    run = api.submit()

    assert api.warning == ""
    base = json.loads(api.ask("get", run.job_id, "--output=json"))
    assert base["spec"]["completions"] == 1
    assert list(api.growth(run)) == ["1", "2"]
    for each in api.growth(run).values():
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["name"]) == (run.submitted["uid"], run.job.name)
    wait_until(lambda: len(api.pods(run)) == 3)
    # All have the run's one Service, and one token.
    selector = json.loads(api.ask("get", f"service/{run.job.name}", "--output=json"))
    assert selector["spec"]["selector"] == {JOB_LABEL: run.job.name}
    assert api.ask("get", f"secret/{run.job.name}-token", "--output=name")


def test_scale_makes_and_deletes_growth_jobs_and_does_nothing_twice(api: Api) -> None:
    run = api.submit()
    seen = []

    for nodes in (4, 4, 2, 2, 1, 1):
        ended = scale(run, nodes)
        assert (ended.status, ended.err) == (0, "")
        assert ended.out == f"{run.job.name} is asked to go on with {nodes} nodes\n"
        seen.append(api.uids(run))

    assert [list(each) for each in seen] == [["1", "2", "3"]] * 2 + [["1"]] * 2 + [[]] * 2
    assert seen[0] == seen[1], "the second call has made them anew"
    assert seen[2].items() <= seen[0].items(), "the node that stays was started again"
    assert api.ask("get", run.job_id, "--output=name"), "the run's own Job is gone"


def test_a_node_that_has_just_left_comes_again_when_it_is_gone(api: Api) -> None:
    run = api.submit()
    wait_until(lambda: len(api.pods(run)) == 3)
    scale(run, 1)

    # Until a pod has ended its node's name is not free; then the same call goes on.
    wait_until(lambda: scale(run, 4).status == 0)

    assert list(api.growth(run)) == ["1", "2", "3"]


def test_a_call_that_failed_midway_is_gone_on_with(api: Api) -> None:
    run = api.submit()
    scale(run, 1)
    wait_until(lambda: len(api.pods(run)) == 1)
    wait_until(lambda: not kubectl_finds(api, f"job/{run.job.name}-g2"))
    api.ask("create", "--filename=-", text=job_of_a_stranger(f"{run.job.name}-g2"))

    failed = scale(run, 4)

    assert failed.status == 1
    assert f'"{run.job.name}-g2" already exists' in failed.err
    assert list(api.growth(run)) == ["1", "3"]
    before = api.uids(run)
    api.ask("delete", f"job/{run.job.name}-g2", "--wait=true")
    assert scale(run, 4).status == 0
    assert list(api.growth(run)) == ["1", "2", "3"]
    assert before.items() <= api.uids(run).items()


def job_of_a_stranger(name: str) -> str:
    pod = {"restartPolicy": "Never", "containers": [{"name": "a", "image": "a"}]}
    spec = {"template": {"spec": pod}}
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": re.sub(r"-g\d$", "", name)}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    return json.dumps(job)


def kubectl_finds(api: Api, name: str) -> bool:
    return bool(api.ask("get", name, "--ignore-not-found", "--output=name"))


def test_a_run_that_has_ended_is_not_scaled(api: Api) -> None:
    run = api.submit()
    wait_until(lambda: len(api.pods(run)) == 3)
    base = f"--selector=job-name={run.job.name}"
    (pod,) = api.ask("get", "pods", base, "--output=name").split()
    api.play(pod, phase="Failed")
    wait_until(lambda: see_run(run, KubernetesRuns()).standing.phase is Phase.FAILED)
    before = api.uids(run)

    ended = scale(run, 4)

    assert ended.status == 2
    assert f"{run.job.name} has ended: failed" in ended.err
    assert api.uids(run) == before
    assert not (run.path / "size.json").exists()


def test_a_further_node_that_fails_is_no_failure_of_the_run(api: Api) -> None:
    run = api.submit()
    wait_until(lambda: len(api.pods(run)) == 3)
    for pod in api.pods(run):
        api.play(pod, phase="Failed" if f"{run.job.name}-g1-" in pod else "Running")

    def conditions() -> list[str]:
        status = api.growth(run)["1"].get("status", {})
        return [each["type"] for each in status.get("conditions") or ()]

    # Kubernetes says FailureTarget first.
    wait_until(lambda: "Failed" in conditions())
    sight = see_run(run, KubernetesRuns())
    assert sight.standing.phase is Phase.RUNNING
    # It counts no more: the node that is asked for is another one.
    assert scale(run, 3).status == 0
    assert list(api.growth(run)) == ["2", "3"]


def test_job_that_has_taken_the_name_between_look_and_removal_stays(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cluster = api.submit(TINY), KubernetesRuns()
    find = Kubectl.find

    def find_and_replace(kubectl: Kubectl, *words: str) -> list[dict[str, Any]]:
        found = find(kubectl, *words)
        if run.job_id in words:
            api.ask("delete", run.job_id)
            api.ask("create", "--filename=-", text=job_of_a_stranger(run.job.name))
        return found

    monkeypatch.setattr(Kubectl, "find", find_and_replace)
    cluster.cancel(run)

    there = json.loads(api.ask("get", run.job_id, "--output=json"))["metadata"]
    assert there["uid"] != run.submitted["uid"]
    assert "deletionTimestamp" not in there


@pytest.mark.slow
def test_name_of_a_run_is_offered_once_it_has_ended_by_a_command_for_that_run_alone(
    api: Api,
) -> None:
    run = api.submit(TINY)
    again = api.try_again(run)
    assert f"Job {run.job.name}: submitted-by " in again
    assert "has not ended" in again
    assert "kubectl --namespace=default --request-timeout=30s delete" not in again
    wait_until(lambda: len(api.pods(run)) == 2)
    for pod in api.pods(run):
        api.play(pod, phase="Failed")
    wait_until(lambda: see_run(run, KubernetesRuns()).standing.phase is Phase.FAILED)

    again = api.try_again(run)

    assert "ended (Failed)" in again
    command = again.splitlines()[-1].strip()
    api.ask("delete", run.job_id)
    api.ask("create", "--filename=-", text=job_of_a_stranger(run.job.name))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert "(Conflict)" in done.stderr
    assert api.ask("get", run.job_id, "--output=name")


def test_nothing_of_an_elastic_run_is_left_after_clean(api: Api) -> None:
    run = api.submit()
    launch("cancel", str(run.path), folder=run.path)
    # Those of further nodes do not go with the run's own: they are asked at once.
    assert api.growth(run) == {}
    wait_until(lambda: not see_run(run, KubernetesRuns()).standing.phase.is_alive)

    cleaned = launch("clean", str(run.path), folder=run.path)

    assert (cleaned.status, cleaned.err) == (0, "")
    kinds = "pods,services,configmaps,secrets,jobs"
    wait_until(lambda: run.job.name not in api.ask("get", kinds, "--output=name"))


def test_jobs_of_further_nodes_that_could_not_be_made_are_asked_for_again(
    api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run begins with its fewest nodes, and says so."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(NO_LISTS.format(kubectl=shutil.which("kubectl")))
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        run = api.submit()
    assert api.growth(run) == {}
    assert "the run begins with 1 nodes, since Jobs of further ones were not created" in api.warning
    assert "etcdserver: request timed out" in api.warning

    (command,) = re.findall(r"launcher (scale .*)$", api.warning)
    assert launch(*shlex.split(command), folder=tmp_path).status == 0
    assert list(api.growth(run)) == ["1", "2"]
