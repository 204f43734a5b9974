"""Growth Jobs: one for each node that an elastic run has beyond its fewest. Pure.

Such a node comes and goes with its Job, and every size is one that whole Jobs make. A growth Job is
the run's own Job cut down to one pod, so what a team's template says of the pods holds for all. It
is owned by the run's Job, and goes with it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.clusters.k8s.objects import FAILED, SUCCEEDED, true_conditions, uids_of, unix_s
from launcher.clusters.k8s.start import JOB_UID
from launcher.clusters.k8s.values import JOB_LABEL
from launcher.job import Job
from launcher.job.cluster_rules import growth_name, num_base_pods, num_pods

NODE_LABEL = "training-recipes/node"
"""Label of growth Jobs and their pods alone: the index of the node."""
OWNER_UID = "UID-OF-THE-JOB"
"""Stands in the rendered growth Jobs for what the run's Job gets when it is created."""
_INDEX = "JOB_COMPLETION_INDEX"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthJob:
    """A growth Job as the cluster has it."""

    index: int
    """Of its node."""
    created: str = ""
    """When, as the cluster writes it: the later, the greater."""
    is_ready: bool = False
    """Whether its pod runs."""
    is_going: bool = False
    """Whether it is being deleted, or is left of another run; its name is not free yet."""
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPlan:
    """What is done for another size."""

    create: tuple[int, ...] = ()
    """Indexes of nodes that get a growth Job."""
    delete: tuple[int, ...] = ()
    """Those whose growth Job goes."""
    num_missing: int = 0
    """How many nodes are wanted beside, whose names are not free yet."""


def growth_range(job: Job) -> range:
    """Return the indexes of all nodes that may get a growth Job; none for a run of one size."""
    return range(num_base_pods(job, job.k8s), num_pods(job, job.k8s))


def plan_growth_jobs(
    present: Sequence[GrowthJob], wanted: int, indexes: Collection[int]
) -> GrowthPlan:
    """Return which growth Jobs are created and deleted for `wanted` nodes beyond the fewest.

    Asked again after a part of it was done, it returns the rest. Nodes that do not run yet go
    first, then those that came last: the lowest index that is free is given again.
    """
    staying = [each for each in present if not (each.is_going or each.has_ended)]
    staying.sort(key=lambda each: (not each.is_ready, each.created, each.index))
    ended = [each.index for each in present if each.has_ended and not each.is_going]
    free = sorted(set(indexes) - {each.index for each in present})
    num_coming = max(0, wanted - len(staying))
    return GrowthPlan(
        create=tuple(free[:num_coming]),
        delete=tuple(sorted([*ended, *(each.index for each in staying[wanted:])])),
        num_missing=max(0, num_coming - len(free)),
    )


def growth_job(
    base: Mapping[str, Any],
    index: int,
    owner_uid: str,
    *,
    priority_class: str | None = None,
    limit_s: int | None = None,
) -> dict[str, Any]:
    """Return the growth Job of a node, made of the run's Job as its manifest has it.

    Its pod has the names that a pod of the run's Job with this index would have. `priority_class`
    is its own, None the one of the run's Job; `limit_s` is how long it may be active, where that is
    limited.
    """
    name, found = base["metadata"]["name"], copy.deepcopy(dict(base))
    run = base["spec"]["template"]["metadata"]["labels"][JOB_LABEL]
    labels = {JOB_LABEL: run, NODE_LABEL: str(index)}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": owner_uid}
    _label(found["metadata"], labels)
    found["metadata"] |= {"name": growth_name(run, index), "ownerReferences": [owner]}
    spec = found["spec"]
    for field in ("completionMode", "maxFailedIndexes"):
        spec.pop(field, None)
    spec |= {"completions": 1, "parallelism": 1}
    if (limit := spec.pop("backoffLimitPerIndex", None)) is not None:
        spec["backoffLimit"] = limit
    if limit_s is not None and "activeDeadlineSeconds" in spec:
        spec["activeDeadlineSeconds"] = limit_s
    template = spec["template"]
    _label(template.setdefault("metadata", {}), labels)
    pod = template["spec"]
    pod["hostname"] = f"{name}-{index}"
    if priority_class is not None:
        pod["priorityClassName"] = priority_class
    for container in [*(pod.get("initContainers") or ()), *pod["containers"]]:
        own = {JOB_UID: owner_uid, _INDEX: str(index)}
        others = [each for each in container.get("env") or () if each["name"] not in own]
        container["env"] = [*({"name": key, "value": own[key]} for key in own), *others]
    return found


def _label(metadata: dict[str, Any], labels: Mapping[str, str]) -> None:
    metadata["labels"] = dict(sorted({**(metadata.get("labels") or {}), **labels}.items()))


def time_left_s(base: Mapping[str, Any], now: float) -> int | None:
    """Return for how long a Job that comes now may be active, None where no time runs.

    So its time limit ends the run's further nodes with the others.
    """
    limit_s = base["spec"].get("activeDeadlineSeconds")
    began = base.get("status", {}).get("startTime")
    if limit_s is None or began is None:
        return None
    return max(1, int(limit_s - (now - unix_s(began))))


def read_growth_jobs(found: Sequence[Mapping[str, Any]], owner_uid: str) -> list[GrowthJob]:
    """Return the growth Jobs of a run, of the Jobs that the cluster has under its labels."""
    jobs = []
    for each in found:
        metadata, status = each["metadata"], each.get("status", {})
        jobs.append(
            GrowthJob(
                index=int(metadata["labels"][NODE_LABEL]),
                created=str(metadata.get("creationTimestamp", "")),
                is_ready=bool(status.get("ready")),
                is_going=bool(metadata.get("deletionTimestamp")) or owner_uid not in uids_of(each),
                has_ended=bool((SUCCEEDED | FAILED) & true_conditions(each).keys()),
            )
        )
    return jobs
