"""What a job and its pods, as kubectl prints them, say of a run. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from launcher.clusters.k8s.growth import NODE_LABEL
from launcher.errors import OutsideError
from launcher.monitor.duration import format_seconds
from launcher.monitor.standing import JobStatus, Phase

Pod = Mapping[str, Any]

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"

_SUCCEEDED = {"Complete", "Completed", "Succeeded"}
"""What a Job and HyperPod's operator call this end of a job."""
_ENDED = {"Succeeded", "Failed"}
_JOB = "batch.kubernetes.io/job"
_FAILURES = (f"{_JOB}-index-failure-count", f"{_JOB}-index-ignored-failure-count")
_BACKOFF_S, _BACKOFF_MAX_S = 10.0, 600.0
"""Kubernetes makes the next pod of an index so long after one has failed, doubled each time."""
_OVERDUE_S = 60.0
"""A pod that is there so long after its grace period has a node that does not answer."""


def read_objects(
    job_text: str, pods_text: str, uid: str, *, lost_nodes: Collection[str] = (), now: float = 0.0
) -> JobStatus:
    """Return what a job and its pods say of a run at `now`, in unix seconds.

    An empty text is a job that is not there; `lost_nodes` are those that the cluster does not hear.
    Raises OutsideError where a text is no JSON.
    """
    if not job_text.strip():
        return JobStatus(phase=Phase.FORGOTTEN, why="the cluster has no such job any more")
    job = read_json(job_text)
    metadata = job.get("metadata", {})
    if uid and metadata.get("uid") != uid:
        why = "the cluster has a job of this name that was created later"
        return JobStatus(phase=Phase.FORGOTTEN, why=why)
    pods = _newest_pods(read_json(pods_text).get("items", []))
    dead = [_dead_words(pod, lost_nodes, now) for pod in pods]
    place = ",".join(sorted({name for pod in pods if (name := pod["spec"].get("nodeName"))}))
    if metadata.get("deletionTimestamp"):
        why = _join(["it is being deleted", *dead])
        return JobStatus(phase=Phase.RUNNING, why=why, place=place)
    conditions = {each["type"]: each for each in _conditions(job) if each.get("status") == "True"}
    if _SUCCEEDED & set(conditions):
        return JobStatus(phase=Phase.SUCCEEDED, place=place)
    if failed := conditions.get("Failed"):
        why = _join([_words(failed), *map(_exit_words, pods)])
        if num := sum(NODE_LABEL in _notes(pod) and _phase(pod) == "Running" for pod in pods):
            why = f"its Job has failed, and {num} further nodes go on without it: {why}"
            return JobStatus(phase=Phase.RUNNING, why=why, place=place)
        return JobStatus(phase=Phase.FAILED, why=why, place=place)
    phases = {_phase(pod) for pod, words in zip(pods, dead, strict=True) if not words}
    ended = "its pods have ended" if phases and phases <= _ENDED else ""
    due = [_next_pod_words(pod, now) for pod in pods]
    why = _join([*dead, ended, *map(_exit_words, pods), *due, *map(_waiting_words, pods)])
    if "Running" in phases or phases == {"Succeeded"}:
        return JobStatus(phase=Phase.RUNNING, why=why, place=place)
    if "Suspended" in conditions:
        return JobStatus(phase=Phase.QUEUED, why="it is suspended, as by a queue")
    why = why or ("its pods have not started" if pods else "no pod has been made yet")
    return JobStatus(phase=Phase.QUEUED, why=why, place=place)


def read_json(text: str) -> dict[str, Any]:
    """Return an object that kubectl has printed. Raises OutsideError where it is none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise OutsideError(f"kubectl printed no JSON but {text.strip()[:200]!r}") from error
    return content if isinstance(content, dict) else {}


def overdue_nodes(pods_text: str, now: float) -> set[str]:
    """Return the nodes of pods that should have ended a minute before `now`, in unix seconds."""
    pods = read_json(pods_text).get("items", ())
    return {pod["spec"]["nodeName"] for pod in pods if _is_overdue(pod, now)}


def _is_overdue(pod: Pod, now: float) -> bool:
    at, is_placed = pod["metadata"].get("deletionTimestamp"), bool(pod["spec"].get("nodeName"))
    is_going = bool(at) and is_placed and _phase(pod) not in _ENDED
    return is_going and now - _seconds(at) > _OVERDUE_S


def _dead_words(pod: Pod, lost_nodes: Collection[str], now: float) -> str:
    """Return what a person does about a pod that stays since its node does not answer."""
    reasons = {each.get("reason") for each in _conditions(pod)}
    node = pod["spec"].get("nodeName")
    is_lost = node in lost_nodes or "DeletionByTaintManager" in reasons
    if not (is_lost and _is_overdue(pod, now)):
        return ""
    return (
        f"{pod['metadata']['name']} is not replaced, since its node {node} does not answer: when "
        f"that machine is off, and only then, kubectl taint nodes {node} {OUT_OF_SERVICE}"
    )


def _newest_pods(pods: Iterable[Pod]) -> list[Pod]:
    """Return the newest pod of each node of the run, the newest first."""
    newest: dict[str, Pod] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))[::-1]:
        newest.setdefault(_node_index(pod), pod)
    return list(newest.values())


def _waiting_words(pod: Pod) -> str:
    """Return why a pod does not run yet, as its scheduler or its node says; else nothing."""
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _words(condition)
    return next((_words(waiting) for each in _states(pod) if (waiting := each.get("waiting"))), "")


def _exit_words(pod: Pod) -> str:
    """Return how a container of a pod failed; nothing where none has."""
    for state in _states(pod):
        ended = state.get("terminated")
        if ended and ended.get("exitCode"):
            reason = f" ({ended['reason']})" if ended.get("reason") else ""
            return f"{pod['metadata']['name']} ended with exit status {ended['exitCode']}{reason}"
    return ""


def _next_pod_words(pod: Pod, now: float) -> str:
    """Return when Kubernetes makes the pod after one that has failed; nothing of other pods."""
    notes, ended = _notes(pod), [each.get("terminated") or {} for each in _states(pod)]
    ends = [at for each in ended if (at := each.get("finishedAt"))]
    if _phase(pod) != "Failed" or not ends or _FAILURES[0] not in notes:
        return ""
    num_before = sum(int(notes.get(key, 0)) for key in _FAILURES)
    # Containers come behind sidecars, whose end delays nothing.
    due = _seconds(ends[-1]) + min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** min(num_before, 10))
    when = f"in {format_seconds(due - now)}" if due > now else "now"
    return f"the next pod of index {_node_index(pod)} is due {when}"


def _words(said: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (said.get("reason"), said.get("message"))))


def _join(parts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, parts)))


def _node_index(pod: Pod) -> str:
    """Return which node of the run a pod is; its name where its kind of job counts none."""
    notes, name = _notes(pod), pod["metadata"]["name"]
    return str(notes.get(NODE_LABEL, notes.get(f"{_JOB}-completion-index", name)))


def _notes(pod: Pod) -> dict[str, str]:
    """Return a pod's annotations and labels."""
    metadata = pod["metadata"]
    return {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}


def _phase(pod: Pod) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def _conditions(each: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return each.get("status", {}).get("conditions") or ()


def _states(pod: Pod) -> list[Mapping[str, Any]]:
    status = pod.get("status", {})
    kinds = ("initContainerStatuses", "containerStatuses")
    return [each.get("state", {}) for kind in kinds for each in status.get(kind) or ()]
