"""The standing of a run, from its job and pods as kubectl prints them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from launcher.clusters.k8s.growth import NODE_LABEL
from launcher.clusters.k8s.objects import SUCCEEDED, read_found, true_conditions, unix_s
from launcher.job.cluster_rules import REPLICATED_JOB
from launcher.monitor.duration import format_seconds
from launcher.monitor.logs import plain
from launcher.monitor.standing import JobStatus, Phase

Pod = Mapping[str, Any]

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"

_ENDED = {"Succeeded", "Failed"}
_JOB = "batch.kubernetes.io/job"
_FAILURES = (f"{_JOB}-index-failure-count", f"{_JOB}-index-ignored-failure-count")
_BACKOFF_S, _BACKOFF_MAX_S = 10.0, 600.0
"""Kubernetes makes the next pod of an index so long after one has failed, doubled each time."""
_NOT_BEGUN = {"ContainerCreating", "PodInitializing"}
_WAIT_S = 15.0
"""Pods that have not begun for longer are looked into."""
_OVERDUE_S = 60.0
"""A pod that is there so long after its grace period has a node that does not answer."""


def read_objects(
    job_text: str,
    pods_text: str,
    uid: str,
    *,
    lost_nodes: Collection[str] = (),
    warned: Sequence[Mapping[str, Any]] = (),
    num_pods: int = 1,
    now: float = 0.0,
) -> JobStatus:
    """Return what a job and its pods say of a run at `now`, in unix seconds.

    An empty text is a job that is not there; `lost_nodes` are those that the cluster does not hear,
    `warned` its warnings, and `num_pods` how many the job makes.
    Raises OutsideError where a text is no JSON.
    """
    job, pods = next(iter(read_found(job_text)), None), _newest_pods(read_found(pods_text))
    place = ",".join(sorted({name for pod in pods if (name := pod["spec"].get("nodeName"))}))
    if job is None and any(map(_is_going, pods)):
        why = "it is deleted, and its pods are ending"
        return JobStatus(phase=Phase.RUNNING, why=why, place=place)
    if job is None:
        return JobStatus(phase=Phase.FORGOTTEN, why="the cluster has no such job any more")
    metadata = job.get("metadata", {})
    if uid and metadata.get("uid") != uid:
        why = "the cluster has a job of this name that was created later"
        return JobStatus(phase=Phase.FORGOTTEN, why=why)
    dead = [_dead_words(pod, lost_nodes, now) for pod in pods]
    if metadata.get("deletionTimestamp"):
        why = _join(["it is being deleted", *dead])
        return JobStatus(phase=Phase.RUNNING, why=why, place=place)
    conditions = true_conditions(job)
    if SUCCEEDED & set(conditions):
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
    why = _join([why, warning_words(pods_that_wait(pods_text, now), warned)])
    if pods and len(pods) < num_pods and (refusal := _refusal_words(job, warned)):
        why = _join([why, f"{len(pods)} of {num_pods} pods are made; {refusal}"])
    if "Running" in phases or phases == {"Succeeded"}:
        return JobStatus(phase=Phase.RUNNING, why=why, place=place)
    if "Suspended" in conditions:
        return JobStatus(phase=Phase.QUEUED, why="it is suspended, as by a queue")
    none = _join(["no pod has been made yet", _refusal_words(job, warned)])
    why = why or ("its pods have not started" if pods else none)
    return JobStatus(phase=Phase.QUEUED, why=why, place=place)


def overdue_nodes(pods_text: str, now: float) -> set[str]:
    """Return the nodes of pods that should have ended a minute before `now`, in unix seconds."""
    pods = read_found(pods_text)
    return {pod["spec"]["nodeName"] for pod in pods if _is_overdue(pod, now)}


def pods_that_wait(pods_text: str, now: float) -> list[Pod]:
    """Return the pods none of whose containers has begun for a while, and none says why."""
    return [
        pod
        for pod in read_found(pods_text)
        if _phase(pod) == "Pending"
        and {each.get("waiting", {}).get("reason") for each in _states(pod)} <= _NOT_BEGUN
        and (at := pod["metadata"].get("creationTimestamp"))
        and now - unix_s(at) > _WAIT_S
    ]


def warning_words(pods: Sequence[Pod], events: Sequence[Mapping[str, Any]]) -> str:
    """Return the newest warning of a cluster about some pods and the claims that they mount."""
    uids = {pod["metadata"].get("uid") for pod in pods}
    volumes = [each for pod in pods for each in pod["spec"].get("volumes") or ()]
    claims = {each.get("persistentVolumeClaim", {}).get("claimName") for each in volumes}
    told = [
        each
        for each in events
        if (about := each["involvedObject"]).get("uid") in uids
        or (about["kind"] == "PersistentVolumeClaim" and about["name"] in claims)
        # The scheduler's are a condition of the pod as well.
        if each["reason"] != "FailedScheduling"
    ]
    if not (last := max(told, key=_time_of, default=None)):
        return ""
    return f"{len(pods)} pods do not begin, of {last['involvedObject']['name']}: {_words(last)}"


def _refusal_words(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """Return why a job lacks a pod, by the cluster's newest warning about it.

    A TrainJob's pods are those of a Job that JobSet makes.
    """
    metadata = job["metadata"]
    names = {name := metadata.get("name"), f"{name}-{REPLICATED_JOB}-0"}
    # An earlier job of the name may have had some as well.
    since = metadata.get("creationTimestamp", "")
    failed = (each for each in events if each["reason"] == "FailedCreate")
    told = [e for e in failed if e["involvedObject"]["name"] in names and _time_of(e) >= since]
    return _words(max(told, key=_time_of, default={}))


def _time_of(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))


def _is_going(pod: Pod) -> bool:
    is_asked, is_placed = "deletionTimestamp" in pod["metadata"], bool(pod["spec"].get("nodeName"))
    return is_asked and is_placed and _phase(pod) not in _ENDED


def _is_overdue(pod: Pod, now: float) -> bool:
    return _is_going(pod) and now - unix_s(pod["metadata"]["deletionTimestamp"]) > _OVERDUE_S


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
    waiting = (each for each in _states(pod) if each.get("waiting"))
    return next((_join([_words(each["waiting"]), _last_line(each)]) for each in waiting), "")


def _last_line(state: Mapping[str, Any]) -> str:
    """Return the last line that a container printed before it ended, if its node knows it.

    Of one that was killed for its memory, which prints none, that it was.
    """
    ended = state.get("terminated") or state["of"].get("lastState", {}).get("terminated") or {}
    message = (ended.get("message") or "").strip()
    if not message and ended.get("reason") == "OOMKilled" and not state.get("terminated"):
        message = "killed for taking more memory than its limit (OOMKilled)"
    return f"{state['of']['name']}: {plain(message.splitlines()[-1])}" if message else ""


def _exit_words(pod: Pod) -> str:
    """Return how a container of a pod failed; nothing where none has."""
    for state in _states(pod):
        ended = state.get("terminated")
        if ended and ended.get("exitCode"):
            reason = f" ({ended['reason']})" if ended.get("reason") else ""
            words = f"{pod['metadata']['name']} ended with exit status {ended['exitCode']}{reason}"
            return _join([words, _last_line(state)])
    return ""


def _next_pod_words(pod: Pod, now: float) -> str:
    """Return when Kubernetes makes the pod after one that has failed; nothing of other pods."""
    notes, ended = _notes(pod), [each.get("terminated") or {} for each in _states(pod)]
    ends = [at for each in ended if (at := each.get("finishedAt"))]
    if _phase(pod) != "Failed" or not ends or _FAILURES[0] not in notes:
        return ""
    num_before = sum(int(notes.get(key, 0)) for key in _FAILURES)
    # Containers come behind sidecars, whose end delays nothing.
    due = unix_s(ends[-1]) + min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** min(num_before, 10))
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


def _conditions(each: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return each.get("status", {}).get("conditions") or ()


def _states(pod: Pod) -> list[Mapping[str, Any]]:
    """Return the states of a pod's containers, each beside all that is known of its container."""
    status = pod.get("status", {})
    kinds = ("initContainerStatuses", "containerStatuses")
    return [{**own.get("state", {}), "of": own} for kind in kinds for own in status.get(kind) or ()]
