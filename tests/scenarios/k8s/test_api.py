"""What a real API server says to our manifests, and what submission does on one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from launcher.clusters.k8s.manifest import MANIFEST
from launcher.clusters.k8s.schema import FOLDER
from launcher.clusters.k8s.submit import submit_k8s
from launcher.errors import OutsideError
from tests.launcher.clusters.k8s.k8s_full import full_job
from tests.launcher.clusters.k8s.published import of_kubernetes, text_of
from tests.launcher.golden import WHOLE
from tests.launcher.k8s_job import documents, k8s_job, manifest, pod
from tests.launcher.shipped import RECIPES, shipped_job
from tests.scenarios.k8s.conftest import kubectl

# A TrainJob is one for Trainer's own webhooks, in test_trainjob.py.
KINDS = ("hyperpod", "job")
# Each shipped recipe is held against the schemas of Kubernetes in tests/launcher.
JOBS = {
    **{f"{recipe}-{kind}": (shipped_job, recipe, kind) for recipe in WHOLE for kind in KINDS},
    **{f"full-{kind}": (full_job, kind) for kind in KINDS},
}
ENFORCE = "pod-security.kubernetes.io/enforce"
PLURALS = {"job": "jobs.batch", "hyperpod": "hyperpodpytorchjobs"}


@pytest.mark.parametrize("name", JOBS)
def test_server_would_take_the_manifest(kube_config: Path, name: str) -> None:
    make, *words = JOBS[name]
    found = documents(make(*words))
    # The same as one of those with a name.
    del found["job"]
    for document in found.values():
        text = json.dumps(document)
        done = kubectl(kube_config, "create", "--dry-run=server", "--filename=-", text=text)
        assert done.returncode == 0, done.stderr
        assert "(server dry run)" in done.stdout


def test_shipped_schemas_are_those_of_a_server(kube_config: Path) -> None:
    """Of its version; `python -m tests.launcher.clusters.k8s.published` makes them anew."""
    found = of_kubernetes(lambda path: kubectl(kube_config, "get", "--raw", path).stdout)

    assert text_of(found) == (FOLDER / "kubernetes.json").read_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", WHOLE)
def test_namespace_with_level_restricted_takes_the_pods(
    kube_config: Path, recipe: str, kind: str
) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"kind": "Namespace", "metadata": {"name": "strict", "labels": label}}
    kubectl(
        kube_config, "apply", "--filename=-", text=json.dumps({"apiVersion": "v1", **namespace})
    )
    words = ("create", "--namespace=strict", "--dry-run=server", "--filename=-")
    spec = pod(shipped_job(recipe, kind))["spec"]
    found = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}

    taken = kubectl(kube_config, *words, text=json.dumps(found))
    spec["hostNetwork"] = True
    refused = kubectl(kube_config, *words, text=json.dumps(found))

    assert taken.returncode == 0, taken.stderr
    assert 'violates PodSecurity "restricted:latest": host namespaces' in refused.stderr


def test_server_tells_pods_of_which_job_they_are(kube_config: Path) -> None:
    """By the label that their agents get as a variable: a Job of the same name has another uid."""
    job = documents(k8s_job("job"))["job"]
    words = ("create", "--dry-run=server", "--output=json", "--filename=-")
    answers = [kubectl(kube_config, *words, text=json.dumps(job)).stdout for _ in range(2)]
    found = [json.loads(answer) for answer in answers]

    labels = [each["spec"]["template"]["metadata"]["labels"] for each in found]
    assert [each["controller-uid"] for each in labels] == [
        each["metadata"]["uid"] for each in found
    ]
    assert labels[0]["controller-uid"] != labels[1]["controller-uid"]


def test_server_refuses_what_the_definition_does(kube_config: Path) -> None:
    document = documents(k8s_job("hyperpod"))["job"]
    document["spec"]["runPolicy"]["cleanPodPolicy"] = "Bogus"

    done = kubectl(
        kube_config, "create", "--dry-run=server", "--validate=false", "--filename=-",
        text=json.dumps(document),
    )  # fmt: skip

    assert done.returncode == 1
    assert "Unsupported value" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_submission_creates_the_job_and_then_leaves_it_alone(
    kube_config: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kube_config))
    job = k8s_job(kind, {"name": f"run-{kind}"})
    (tmp_path / MANIFEST).write_text(manifest(job))

    submission = submit_k8s(tmp_path, job)

    stored = kubectl(kube_config, "get", f"{PLURALS[kind]}/{job.name}", "--output=json").stdout
    assert submission.job_id.endswith(f"/{job.name}")
    (tmp_path / MANIFEST).write_text(manifest(k8s_job(kind, {"name": job.name, "env": {"A": "1"}})))
    with pytest.raises(OutsideError, match="already exists"):
        submit_k8s(tmp_path, job)
    again = kubectl(kube_config, "get", f"{PLURALS[kind]}/{job.name}", "--output=json").stdout
    assert json.loads(again)["spec"] == json.loads(stored)["spec"]


@pytest.mark.skipif(
    "KUBECONFIG" not in os.environ or shutil.which("kubectl") is None,
    reason="KUBECONFIG names no cluster, or no kubectl on this machine",
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_cluster_of_the_environment_would_take_a_plain_job(recipe: str) -> None:
    """Only asks: nothing is stored there."""
    config = Path(os.environ["KUBECONFIG"])

    done = kubectl(
        config, "create", "--dry-run=server", "--filename=-",
        text=manifest(shipped_job(recipe, "job")),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
