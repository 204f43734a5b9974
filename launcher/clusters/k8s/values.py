"""What the templates of a manifest are filled with.

Values that follow from several of the job's fields are worked out here; the
templates take the others from the job itself. Order is fixed everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launcher.clusters.k8s.security import (
    daemon_security,
    efa_devices,
    pod_security,
    workers_security,
)
from launcher.clusters.k8s.sidecar import K8S_NAMESPACE, MEMORYD_FOLDER, shm_size, sidecar_values
from launcher.clusters.k8s.start import (
    CONFIG_PATH,
    JOB_UID,
    K8S_NODE,
    POD_IP,
    POD_NAME,
    run_path,
    start_command,
)
from launcher.clusters.k8s.token import token_path, token_values
from launcher.job import Job
from launcher.job.cluster import RENDEZVOUS_PORT, K8sCluster
from launcher.job.cluster_rules import REPLICA_NAME, REPLICATED_JOB, num_base_pods, pods_name
from launcher.job.environment import worker_environment
from launcher.job.fields import time_limit_seconds
from launcher.job.tiered_memory import requested_memory_gib
from launcher.job.tiered_rules import OPERATOR_PORT
from launcher.job.workload import Instance, TrainerSettings
from launcher.support import notes
from resilience.node_config import UNSTORED_STATUS

_REFUSED_STATUS = 2
"""Exit status of a run whose checkpoints' namespace is another run's."""
JOB_LABEL = "training-recipes/job"
"""Label by which the pods of one job find each other."""

NOTES_ANNOTATION = "training-recipes/notes"
"""What has to change before the job runs, or has to be known, a line each."""

INSTANCE_LABEL = "node.kubernetes.io/instance-type"

_EFA = "vpc.amazonaws.com/efa"
# A node that is drained to save costs ends a step of all the others.
_KEPT_ON_THEIR_NODES = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_K8S_RETRIES_MAX = 6
_FULL_RESTARTS_MAX = 1
# HyperPod's operator takes no snooze without a period, and its own command line sets this one.
_EVAL_PERIOD_S = 3600
_AWS_TYPE = "ml."
# What kubelet and the system keep of a node's CPUs: of each up to the one named, and once.
_RESERVED_OF_CPU = ((1, 0.3), (2, 0.15), (4, 0.1), (math.inf, 0.06))
_RESERVED_CPUS = 0.1


def manifest_values(job: Job, cluster: K8sCluster) -> dict[str, Any]:
    """Return the values for the templates of the job's kind, all but the files' texts."""
    requests, limits = _resources(job)
    told = notes(job)
    # At which each pod is found by the others, or by the operator.
    port = cluster.rdzv_port or (RENDEZVOUS_PORT if cluster.has_indexed_pods else OPERATOR_PORT)
    return {
        "job": job,
        "cluster": cluster,
        "config_path": CONFIG_PATH,
        "run_path": run_path(job, cluster),
        "token_path": token_path(job),
        "agent_command": start_command(job, cluster),
        "port": port,
        "job_label": JOB_LABEL,
        "pods_name": pods_name(job, cluster),
        "replica_name": REPLICA_NAME,
        "replicated_job": REPLICATED_JOB,
        "num_base_pods": num_base_pods(job, cluster),
        "notes": told,
        **_metadata(job, cluster, told),
        "env": _env(job, cluster),
        "memoryd": sidecar_values(job),
        "token": token_values(job),
        "shm_size": shm_size(job),
        "requests": requests,
        "limits": limits,
        "node_selector": _node_selector(job.instance, cluster),
        "probes": _probes(cluster),
        "pod_security": pod_security(cluster),
        "workers_security": workers_security(job, cluster),
        "daemon_security": daemon_security(cluster),
        "deadline_s": time_limit_seconds(job.time_limit) if job.time_limit else None,
        "failed_pods_max": _failed_pods_max(job, cluster),
        "final_statuses": (_REFUSED_STATUS, UNSTORED_STATUS),
        "retries_max": _retries_max(job, cluster),
        "restart_policy": _restart_policy(job, cluster),
    }


def _metadata(job: Job, cluster: K8sCluster, told: list[str]) -> dict[str, dict[str, str]]:
    labels = {
        **cluster.labels,
        "app.kubernetes.io/managed-by": "training-recipes",
        "app.kubernetes.io/name": job.name,
    }
    # JobSet's Service is for pods with this label; growth Jobs are no part of the JobSet.
    own = {"jobset.sigs.k8s.io/jobset-name": job.name} if cluster.job_kind == "trainjob" else {}
    queue = _set(**{_QUEUE_LABEL: cluster.queue, _PRIORITY_LABEL: cluster.queue_priority})
    annotations = {
        **cluster.annotations,
        "training-recipes/description": job.recipe.description,
        "training-recipes/digest": job.digest(),
        "training-recipes/recipe": job.recipe.name,
        "training-recipes/version": str(job.recipe.version),
    }
    noted = {NOTES_ANNOTATION: "\n".join(told)} if told else {}
    return {
        "labels": _sorted(labels),
        # Kueue admits the job; its pods must not ask on their own.
        "job_labels": _sorted(labels | queue),
        "pod_labels": _sorted({**labels, JOB_LABEL: job.name, **own}),
        "annotations": _sorted(annotations),
        "job_annotations": _sorted(annotations | noted),
        "pod_annotations": _sorted(_KEPT_ON_THEIR_NODES | cluster.annotations),
    }


def _env(job: Job, cluster: K8sCluster) -> dict[str, dict[str, Any]]:
    """Return the container's variables by name, each with a value, a secret or a pod's field."""
    texts = worker_environment(job)
    # Kubernetes gives a Job's pods this label in all versions from 1.24.
    own = {JOB_UID: "metadata.labels['controller-uid']"}
    if cluster.job_kind == "hyperpod":
        own = {POD_NAME: "metadata.name"}
    fields = {POD_IP: "status.podIP", **own}
    if job.memoryd:
        # By these workers and daemon find each other.
        texts = {"MEMORYD_DIR": MEMORYD_FOLDER, "MEMORYD_TOKEN_FILE": token_path(job)} | texts
        fields |= {K8S_NODE: "spec.nodeName", K8S_NAMESPACE: "metadata.namespace"}
    variables: dict[str, dict[str, Any]] = {
        **{name: {"field": field} for name, field in fields.items()},
        **{name: {"value": literal(text)} for name, text in texts.items()},
        **{name: {"secret": secret} for name, secret in cluster.secrets.items()},
    }
    return dict(sorted(variables.items()))


def literal(text: str) -> str:
    """Return text that Kubernetes turns back into `text` where it expands $(VARIABLE).

    It does so in the values of variables, in a container's command and in a
    probe's. Every dollar sign is doubled: a single one in front of a letter
    beyond ASCII would not survive.
    """
    return text.replace("$", "$$")


def _resources(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (requests, limits): limits that have to equal the request, and memory_limit_gib."""
    asked, trainer, instance = job.resources, job.trainer, job.instance
    fixed = {
        "nvidia.com/gpu": trainer.num_devices if instance.accelerator == "gpu" else None,
        _EFA: efa_devices(trainer, instance, job.num_nodes_max) or None,
        "hugepages-2Mi": _quantity(asked.hugepages_2mi_mib or None, "Mi"),
    }
    num_cpus = asked.num_cpus or _share_of_cpus(trainer, instance)
    gib, limit_gib = requested_memory_gib(job), job.k8s.security.memory_limit_gib
    requests = _set(cpu=num_cpus, memory=_quantity(gib, "Gi"), **fixed)
    return requests, _set(memory=_quantity(limit_gib, "Gi"), **fixed)


def _share_of_cpus(trainer: TrainerSettings, instance: Instance) -> int | None:
    """Return the CPUs for a pod on one of AWS's types: its devices' share of what pods may have.

    What kubelet and the system keep for themselves is HyperPod's rule for quotas. Of another
    machine nobody knows what its cluster keeps, and a pod that asks for too much never starts.
    """
    if instance.accelerator != "gpu" or not instance.type.startswith(_AWS_TYPE):
        return None
    reserved = sum(
        next(share for last, share in _RESERVED_OF_CPU if number <= last)
        for number in range(1, instance.num_vcpus + 1)
    )
    allocatable = math.floor(instance.num_vcpus - _RESERVED_CPUS - reserved)
    return max(1, allocatable * trainer.num_devices // instance.num_devices)


def _node_selector(instance: Instance, cluster: K8sCluster) -> dict[str, str]:
    own = {INSTANCE_LABEL: instance.type} if instance.type.startswith(_AWS_TYPE) else {}
    return _sorted(own | cluster.node_selector)


def _probes(cluster: K8sCluster) -> dict[str, dict[str, Any]]:
    return {
        f"{kind}Probe": {**dict(probe), "command": [literal(word) for word in probe.command]}
        for kind, probe in cluster.probes
        if probe
    }


def _failed_pods_max(job: Job, cluster: K8sCluster) -> dict[str, int]:
    """Return how many pods may fail before the Job does; nothing leaves it at Kubernetes' 6.

    A failed pod is started again under its index, which is how a lost node is replaced where the
    run recovers: so there as many may fail of each index as a node may have incidents. Counted by
    index, a failure delays no other index's next pod.
    """
    retries_max, feature = cluster.run_policy.retries_max, job.resilience.checkpointless
    limits = {} if retries_max is None else {"backoffLimit": retries_max}
    if not (feature or job.memoryd):
        return limits
    of_index = feature.process_restarts_max if feature else _K8S_RETRIES_MAX
    # Kubernetes keeps the number in 32 bits.
    of_index = min(of_index if retries_max is None else retries_max, 2**31 - 1)
    return {**limits, "backoffLimitPerIndex": of_index, "maxFailedIndexes": 0}


def _retries_max(job: Job, cluster: K8sCluster) -> int:
    """Return how often the operator starts a run again that has given up, or has lost a pod.

    Never without a limit, and never 0 unless somebody asks for it.
    """
    if cluster.run_policy.retries_max is not None:
        return cluster.run_policy.retries_max
    feature = job.resilience.checkpointless
    restarts_max = feature.process_restarts_max if feature else job.trainer.max_restarts
    return min(restarts_max or _K8S_RETRIES_MAX, 2**31 - 1)


def _restart_policy(job: Job, cluster: K8sCluster) -> dict[str, Any]:
    """Return HyperPod's restart limits; the cluster's word comes before the feature's."""
    policy, feature = cluster.run_policy.restart_policy, job.resilience.checkpointless
    elastic = job.resilience.elastic
    limits = _set(
        evalPeriodSeconds=feature.restart_window_s if feature else elastic and _EVAL_PERIOD_S,
        numRestartBeforeFullJobRestart=feature and feature.process_restarts_max,
        scaleUpSnoozeTimeInSeconds=elastic and math.ceil(elastic.scale_up_snooze_s),
    )
    if policy or limits:
        # Each makes all pods anew, after as many restarts as the recipe allows within the window.
        limits["maxFullJobRestarts"] = _FULL_RESTARTS_MAX
    own = policy and _set(
        evalPeriodSeconds=policy.eval_period_s,
        maxFullJobRestarts=policy.full_job_restarts_max,
        numRestartBeforeFullJobRestart=policy.restarts_before_full_job,
        maxNumRepeatOffendersToAvoid=policy.repeat_offenders_to_avoid_max,
        scaleUpSnoozeTimeInSeconds=policy.scale_up_snooze_s,
    )
    return limits | (own or {})


def _quantity(number: int | None, unit: str) -> str | None:
    return None if number is None else f"{number}{unit}"


def _set(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value; null leaves one to the cluster's default."""
    return {name: value for name, value in fields.items() if value is not None}


def _sorted(texts: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(texts.items()))
