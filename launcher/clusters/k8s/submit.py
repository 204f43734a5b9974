"""Hand a rendered manifest to kubectl."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher.clusters.k8s.manifest import MANIFEST
from launcher.clusters.submission import Submission, run_program
from launcher.errors import OutsideError
from launcher.job import Job
from launcher.job.cluster import K8sCluster

_KINDS = {"job": "jobs.batch", "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com"}


def submit_k8s(run_dir: Path, job: Job) -> Submission:
    """Create what the manifest in `run_dir` holds in the cluster that kubectl points at.

    Nothing that exists is changed, be it another job's or a stranger's: the
    server is asked first whether it would take everything, so that a refusal
    leaves nothing behind. Raises OutsideError with kubectl's own words.
    """
    cluster = job.cluster
    assert isinstance(cluster, K8sCluster)
    kubectl = ("kubectl", f"--namespace={cluster.namespace}", "--request-timeout=30s")
    command = (*kubectl, "create", f"--filename={MANIFEST}")
    try:
        run_program((*command, "--dry-run=server"), run_dir)
    except OutsideError as error:
        if "already exists" not in str(error):
            raise
        remove = (*kubectl[:2], "delete", "--ignore-not-found", f"--filename={MANIFEST}")
        raise OutsideError(
            f"{error}\nwhat exists was left as it is; set run.name, or remove it first: "
            f"{shlex.join(remove)}"
        ) from error
    output = run_program(command, run_dir)
    return Submission(
        command=command, job_id=f"{_KINDS[cluster.job_kind]}/{job.name}", output=output
    )
