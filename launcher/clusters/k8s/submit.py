"""Hand a rendered manifest to kubectl."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.clusters.k8s.check import read_job
from launcher.clusters.k8s.growth import growth_job, growth_list, growth_range
from launcher.clusters.k8s.manifest import GROWTH, MANIFEST
from launcher.clusters.k8s.token import token_secret
from launcher.clusters.submission import Submission, run_program
from launcher.clusters.token import token_secret_name
from launcher.errors import OutsideError
from launcher.job import Job
from launcher.job.cluster import K8sCluster
from resilience.plain_files import read_plain_text

_KINDS = {"job": "jobs.batch", "hyperpod": "hyperpodpytorchjobs.sagemaker.amazonaws.com"}

_OLD_SECRET_S = 30.0
"""How long the Secret of an earlier job of this name may take to go with it."""
_PAUSE_S = 1.0


def submit_k8s(run_dir: Path, job: Job) -> Submission:
    """Create what the manifest in `run_dir` holds in the cluster that kubectl points at.

    Nothing that exists is changed, be it another job's or a stranger's: the
    server is asked first whether it would take everything, so that a refusal
    leaves nothing behind. Raises OutsideError with kubectl's own words.
    """
    cluster = job.cluster
    assert isinstance(cluster, K8sCluster)
    kubectl = kubectl_command(cluster)
    command = (*kubectl, "create", f"--filename={MANIFEST}")
    further = (f"--filename={GROWTH}",) if (run_dir / GROWTH).exists() else ()
    try:
        run_program((*command, *further, "--dry-run=server"), run_dir)
    except OutsideError as error:
        if "already exists" not in str(error):
            raise
        files = (f"--filename={MANIFEST}", *further)
        remove = (*kubectl[:2], "delete", "--ignore-not-found", *files)
        raise OutsideError(
            f"{error}\nwhat exists was left as it is; set run.name, or remove it first: "
            f"{shlex.join(remove)}"
        ) from error
    output = run_program(command, run_dir)
    job_id = f"{_KINDS[cluster.job_kind]}/{job.name}"
    owner: dict[str, str] = {}
    warning = ""
    if token_secret_name(job):
        owner = _create_token(kubectl, job_id, job, run_dir)
    try:
        owner = owner or _read_owner(kubectl, job_id, run_dir)
        _give_to_job(kubectl, owner, job, run_dir)
    except (OutsideError, ValueError) as error:
        # The job runs; `clean` removes them as well.
        warning = f"what belongs to {job_id} stays when it is deleted: {error}"
    if further:
        warning = "\n".join(filter(None, (warning, _add_nodes(kubectl, owner, job, run_dir))))
    return Submission(
        command=command,
        job_id=job_id,
        output=output,
        uid=owner.get("uid", ""),
        warning=warning,
    )


def _add_nodes(kubectl: tuple[str, ...], owner: Mapping[str, str], job: Job, run_dir: Path) -> str:
    """Create the Jobs of the nodes beyond the fewest; returns what did not work."""
    cluster = job.cluster
    assert isinstance(cluster, K8sCluster)
    indexes = [index for index in growth_range(job) if index < job.num_nodes_started]
    try:
        owner = owner or _read_owner(kubectl, f"{_KINDS['job']}/{job.name}", run_dir)
        create_growth(cluster, owner["uid"], indexes, run_dir)
    except (OutsideError, ValueError) as error:
        return (
            f"the run begins with {growth_range(job).start} nodes, since Jobs of further ones "
            f"were not created: {error}\nask for them once more: launcher scale "
            f"{shlex.quote(str(run_dir))} nodes={job.trainer.num_nodes}"
        )
    return ""


def create_growth(
    cluster: K8sCluster,
    owner_uid: str,
    indexes: Iterable[int],
    run_dir: Path,
    *,
    limit_s: int | None = None,
) -> None:
    """Create growth Jobs, made of the run's Job as it was submitted. Raises OutsideError."""
    base = read_job(read_plain_text(run_dir / MANIFEST))
    own = {"priority_class": cluster.growth_priority_class}
    jobs = [growth_job(base, index, owner_uid, limit_s=limit_s, **own) for index in indexes]
    run_program((*kubectl_command(cluster), "create", "--filename=-"), run_dir, growth_list(jobs))


def kubectl_command(cluster: K8sCluster) -> tuple[str, ...]:
    """Return how kubectl is called for a cluster: it gives up by itself."""
    return ("kubectl", f"--namespace={cluster.namespace}", "--request-timeout=30s")


def _read_owner(kubectl: tuple[str, ...], job_id: str, run_dir: Path) -> dict[str, str]:
    """Return by what other objects name the job that they belong to."""
    fields = ("apiVersion", "kind", "metadata.name", "metadata.uid")
    path = "{'\\n'}".join(f"{{.{field}}}" for field in fields)
    found = run_program((*kubectl, "get", job_id, f"--output=jsonpath={path}"), run_dir)
    return dict(zip(("apiVersion", "kind", "name", "uid"), found.split(), strict=True))


def _give_to_job(
    kubectl: tuple[str, ...], owner: Mapping[str, str], job: Job, run_dir: Path
) -> None:
    """Have Kubernetes remove the job's ConfigMap and Service with it."""
    cluster = job.cluster
    assert isinstance(cluster, K8sCluster)
    names = [f"configmap/{job.name}"]
    if cluster.job_kind == "job":
        names.append(f"service/{job.name}")
    patch = json.dumps({"metadata": {"ownerReferences": [dict(owner)]}})
    run_program((*kubectl, "patch", *names, "--type=merge", f"--patch={patch}"), run_dir)


def _create_token(kubectl: tuple[str, ...], job_id: str, job: Job, run_dir: Path) -> dict[str, str]:
    """Create the Secret that the pods wait for; it goes with the job that exists by now."""
    end_s = time.monotonic() + _OLD_SECRET_S
    try:
        owner = _read_owner(kubectl, job_id, run_dir)
        while not _has_token(kubectl, owner, job, run_dir):
            if time.monotonic() >= end_s:
                raise OutsideError(  # noqa: TRY301
                    f"the Secret {token_secret_name(job)} of an earlier job is still there after "
                    f"{_OLD_SECRET_S:.0f} s"
                )
            # Kubernetes collects it some time after its job; nothing tells when.
            time.sleep(_PAUSE_S)
    except (OutsideError, ValueError) as error:
        remove = shlex.join((*kubectl[:2], "delete", job_id))
        raise OutsideError(
            f"{job_id} exists, but its pods wait for a token: {error}\nremove it: {remove}"
        ) from error
    return owner


def _has_token(kubectl: tuple[str, ...], owner: Mapping[str, str], job: Job, run_dir: Path) -> bool:
    """Create the Secret; returns False while that of an earlier job, which goes, has its name.

    One that belongs to no job is the user's own, and stays.
    """
    try:
        # By standard input: arguments and files may be read by others.
        run_program((*kubectl, "create", "--filename=-"), run_dir, token_secret(job, owner))
    except OutsideError as error:
        if "already exists" not in str(error):
            raise
    else:
        return True
    path = "{.metadata.ownerReferences[*].uid}"
    command = (*kubectl, "get", f"secret/{token_secret_name(job)}", "--ignore-not-found")
    found = run_program((*command, f"--output=jsonpath=there {path}"), run_dir).split()
    # Nothing at all: it went just now.
    return bool(found) and (found[1:] == [] or owner["uid"] in found[1:])
