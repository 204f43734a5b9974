"""Hand a rendered manifest to kubectl."""

from __future__ import annotations

from pathlib import Path

from launcher.clusters.k8s.manifest import MANIFEST
from launcher.clusters.submission import Submission, run_program
from launcher.errors import OutsideError
from launcher.job import Job
from launcher.job.cluster import K8sCluster

_KINDS = {"job": "jobs.batch", "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com"}


def submit_k8s(run_dir: Path, job: Job) -> Submission:
    """Apply the manifest in `run_dir` to the cluster that kubectl points at.

    A job of that name in the namespace is left as it is and refused: applying
    over it would change a run that somebody relies on. What a deleted job left
    behind, its ConfigMap and Service, is brought up to date. Raises
    OutsideError with kubectl's own words.
    """
    cluster = job.cluster
    assert isinstance(cluster, K8sCluster)
    name = f"{_KINDS[cluster.job_kind]}/{job.name}"
    kubectl = ("kubectl", f"--namespace={cluster.namespace}", "--request-timeout=30s")
    if run_program((*kubectl, "get", name, "--ignore-not-found", "--output=name"), run_dir).strip():
        raise OutsideError(
            f"{name} exists in namespace {cluster.namespace!r} and was left as it is; "
            f"set run.name, or first run: kubectl --namespace={cluster.namespace} delete {name}"
        )
    command = (*kubectl, "apply", f"--filename={MANIFEST}")
    return Submission(command=command, job_id=name, output=run_program(command, run_dir))
