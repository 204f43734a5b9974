"""Hand a rendered manifest to kubectl."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.clusters.k8s import objects
from launcher.clusters.k8s.check import indexed_job, read_documents
from launcher.clusters.k8s.growth import NODE_LABEL, growth_job, growth_range
from launcher.clusters.k8s.kubectl import Kubectl
from launcher.clusters.k8s.manifest import GROWTH, MANIFEST
from launcher.clusters.k8s.objects import Found
from launcher.clusters.k8s.token import SECRET_KEY, token_secret
from launcher.clusters.k8s.values import JOB_LABEL
from launcher.clusters.submission import Submission, submitter
from launcher.clusters.token import token_secret_name
from launcher.errors import OutsideError
from launcher.job import Job
from resilience.plain_files import read_plain_text

_SIDECAR = "restartPolicy of an init container"
SINCE = {"podFailurePolicy": 26, "backoffLimitPerIndex": 29, _SIDECAR: 29}
"""Fields of plain Jobs, and the N from which Kubernetes 1.N has each by default."""

_OWNED = {"ConfigMap", "NetworkPolicy", "Service"}

_WITHOUT_POLICY = "nothing was created; cluster.network_policy=false leaves the NetworkPolicy out"

_OLD_SECRET_S = 30.0
"""How long the Secret of an earlier job of this name may take to go with it."""
_JOBSET_S = 30.0
"""Seconds in which the controllers have to make the Job of a TrainJob."""
_PAUSE_S = 1.0


def submit_k8s(run_dir: Path, job: Job) -> Submission:
    """Create what the manifest in `run_dir` holds in the cluster that kubectl points at.

    Nothing that exists is changed, be it another job's or a stranger's: the server is asked first
    whether it would take everything. The job is created before all else. So one of two submissions
    at once has the name, and its further objects belong to its job from their beginning. A job
    whose further objects cannot be created is removed. Kubeflow's Trainer wants a runtime to be
    there before its TrainJob; without the TrainJob it is removed, too. Raises OutsideError with
    kubectl's words.
    """
    kubectl = Kubectl(job, run_dir)
    further = (f"--filename={GROWTH}",) if (run_dir / GROWTH).exists() else ()
    files = (f"--filename={MANIFEST}", *further)
    documents = read_documents(read_plain_text(run_dir / MANIFEST))
    base = next(each for each in documents if each["kind"] in objects.JOBS)
    first = [*(each for each in documents if each["kind"] == objects.RUNTIME), base]
    _check_server(kubectl, base if job.k8s.job_kind == "hyperpod" else indexed_job(documents))
    for each in first:
        notes = each["metadata"].get("annotations") or {}
        each["metadata"]["annotations"] = {**notes, objects.SUBMITTED_BY: submitter(run_dir)}
    made: list[dict[str, Any]] = []
    try:
        _ask_server(kubectl, base, documents, files)
        for each in first:
            made += objects.read_found(kubectl.create(each))
        owner = objects.owner_of(made[-1])
        for each in made[:-1]:
            kubectl.give(each, owner)
        made = made[-1:]
        for each in (each for each in documents if each not in first):
            if each["kind"] in _OWNED and each["metadata"]["name"] == job.name:
                each["metadata"]["ownerReferences"] = [owner]
            kubectl.create(each)
        if token_secret_name(job):
            _create_token(kubectl, owner)
    except (OutsideError, KeyboardInterrupt) as error:
        if not made and isinstance(error, KeyboardInterrupt):
            raise
        # No run's folder would know of the job.
        words = [str(error) or "interrupted", *(_undo(kubectl, each) for each in reversed(made))]
        if all(each["kind"] == objects.RUNTIME for each in made):
            words += _remedies(kubectl, str(error), files)
        raise OutsideError("\n".join(words)) from error
    return Submission(
        command=(*kubectl.command, "create", files[0]),
        job_id=kubectl.job_names[0],
        output=f"{kubectl.job_names[0]} created\n",
        uid=owner["uid"],
        warning=_add_nodes(kubectl, made[0]) if further else "",
    )


def _ask_server(
    kubectl: Kubectl, base: Found, documents: Sequence[Found], files: Sequence[str]
) -> None:
    """Have the server say whether it would take everything.

    Trainer refuses a TrainJob without its runtime, so of those the server is asked about the rest.
    """
    words, text = files, ""
    if base["kind"] == "TrainJob":
        rest = objects.list_of([each for each in documents if each is not base])
        words, text = ("--filename=-",), json.dumps(rest)
    kubectl.ask("create", *words, "--dry-run=server", text=text)


def _remedies(kubectl: Kubectl, refusal: str, files: Sequence[str]) -> list[str]:
    """Return what to do about a server's refusal, nothing where its own words say all."""
    if "already exists" in refusal:
        return [_taken_text(kubectl, files)]
    return [_WITHOUT_POLICY] if re.search("networkpolicies.* is forbidden", refusal) else []


def _check_server(kubectl: Kubectl, base: Found) -> None:
    """Refuse a server that lacks fields of the job, which it may drop in silence."""
    try:
        answer = json.loads(kubectl.ask("version", "--output=json"))
    except (OutsideError, ValueError):
        return  # The next question brings the server's own words.
    if problem := server_problem(base, answer.get("serverVersion") or {}):
        raise OutsideError(problem)


def server_problem(base: Found, version: Mapping[str, str]) -> str:
    """Return why a server of a version cannot run a job; empty where it may. Pure."""
    first = base["spec"].get("template", {}).get("spec", {}).get("initContainers") or ()
    names = {*base["spec"], *(_SIDECAR for each in first if "restartPolicy" in each)}
    name = max(SINCE.keys() & names, key=lambda each: (SINCE[each], each), default="")
    # EKS writes its minor version with a plus.
    found = re.fullmatch(r"(\d+)\+?", version.get("minor", ""))
    if not name or found is None or version.get("major") != "1" or int(found[1]) >= SINCE[name]:
        return ""
    return (
        f"the cluster has Kubernetes {version.get('gitVersion', found[1])}, and this job needs 1."
        f"{SINCE[name]} or newer, for {name} (docs/clusters.md); nothing was created"
    )


def _taken_text(kubectl: Kubectl, files: Sequence[str]) -> str:
    """Return what is to be said of objects that have the names of a submission."""
    selector = f"--selector={JOB_LABEL}={kubectl.job.name},{NODE_LABEL}"
    try:
        found = [*kubectl.find(*files), *kubectl.find("jobs.batch", selector)]
    except OutsideError as error:
        return f"nothing was changed; set run.name to a name that is free\n{error}"
    once = {each["metadata"]["uid"]: each for each in found}
    own, now = submitter(kubectl.folder), time.time()
    return objects.taken_text([*once.values()], own, kubectl.removal_text, now)


def _undo(kubectl: Kubectl, created: Found) -> str:
    """Remove the job of a submission that failed, or its runtime; returns what became of it."""
    what = "runtime" if created["kind"] == objects.RUNTIME else "job"
    try:
        kubectl.remove(created)
    except OutsideError as error:
        remedy = f"remove it:\n  {kubectl.removal_text(created)}"
        return f"the {what} exists, and could not be removed: {error}\n{remedy}"
    return f"the {what} had been created, and was removed again"


def wait_for_indexed_job(kubectl: Kubectl, job: Found) -> Found:
    """Return the Indexed Job of a run's job: itself, or the one that JobSet makes of a TrainJob.

    Raises OutsideError where there is none after a while.
    """
    end_s = time.monotonic() + _JOBSET_S
    last = job
    while last["kind"] != "Job":
        if time.monotonic() >= end_s:
            raise OutsideError(f"{kubectl.job_names[-1]} is still missing after {_JOBSET_S:.0f} s")
        time.sleep(_PAUSE_S)
        *_, last = job, *objects.belonging(kubectl.find(*kubectl.job_names), job["metadata"]["uid"])
    return last


def _add_nodes(kubectl: Kubectl, created: Found) -> str:
    """Create the Jobs of the nodes beyond the fewest; returns what did not work."""
    job = kubectl.job
    indexes = [index for index in growth_range(job) if index < job.num_nodes_started]
    try:
        owner = wait_for_indexed_job(kubectl, created)
        create_growth(kubectl, owner["metadata"]["uid"], indexes)
    except OutsideError as error:
        return (
            f"the run begins with {growth_range(job).start} nodes, since Jobs of further ones "
            f"were not created: {error}\nask for them once more: launcher scale "
            f"{shlex.quote(str(kubectl.folder))} nodes={job.trainer.num_nodes}"
        )
    return ""


def create_growth(
    kubectl: Kubectl, owner_uid: str, indexes: Iterable[int], *, limit_s: int | None = None
) -> None:
    """Create growth Jobs, made of the run's Job as it was submitted. Raises OutsideError."""
    base = indexed_job(read_documents(read_plain_text(kubectl.folder / MANIFEST)))
    own = {"priority_class": kubectl.job.k8s.growth_priority_class}
    jobs = [growth_job(base, index, owner_uid, limit_s=limit_s, **own) for index in indexes]
    kubectl.create(objects.list_of(jobs))


def _create_token(kubectl: Kubectl, owner: Mapping[str, str]) -> None:
    """Create the Secret that the pods wait for; it goes with the job that exists by now.

    One that belongs to no job is the user's own, and stays.
    """
    name, end_s = token_secret_name(kubectl.job), time.monotonic() + _OLD_SECRET_S
    while True:
        try:
            kubectl.create(token_secret(kubectl.job, owner))
        except OutsideError as error:
            if "already exists" not in str(error):
                raise
        else:
            return
        for each in kubectl.find(f"secret/{name}"):
            uids = objects.uids_of(each)
            if len(uids) == 1 and SECRET_KEY not in (each.get("data") or {}):
                raise OutsideError(
                    f"the Secret {name} was there before, and has no key {SECRET_KEY!r}, without "
                    "which no pod begins; give it one, or set run.name to a name that is free"
                )
            if len(uids) == 1 or owner["uid"] in uids:
                return
        if time.monotonic() >= end_s:
            raise OutsideError(
                f"the Secret {name} of an earlier job is still there after {_OLD_SECRET_S:.0f} s"
            )
        # Kubernetes collects it some time after its job; nothing tells when.
        time.sleep(_PAUSE_S)
