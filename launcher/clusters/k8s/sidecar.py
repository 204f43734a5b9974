"""The checkpoint daemon of a pod: a container beside that of the workers."""

from __future__ import annotations

from typing import Any

from launcher.clusters.k8s.start import peer_port
from launcher.clusters.memoryd import memoryd_config
from launcher.job import Job
from launcher.job.cluster import K8sCluster
from launcher.job.cluster_rules import num_pods, pod_name
from launcher.job.tiered_memory import shm_mib, tiered_mib
from resilience.node_config import MemorydConfig

K8S_NAMESPACE = "LAUNCHER_K8S_NAMESPACE"
"""Variable with the pod's namespace: a run's folder has one path in each."""

MEMORYD_FOLDER = "/dev/shm/memoryd"
"""Each pod has a /dev/shm of its own."""

# An arena goes with its pod, so the store has to get what it has to get before.
_DRAIN_S = 60
_CLOSE_S = 15


def sidecar_values(job: Job) -> dict[str, Any] | None:
    """Return what the template of the daemon's container is filled with, None without one."""
    settings = job.memoryd
    if settings is None:
        return None
    return {
        "port": peer_port(settings),
        "memory": f"{tiered_mib(job)}Mi",
        "folder": MEMORYD_FOLDER,
        "end_s": _DRAIN_S + _CLOSE_S if settings.store else 0,
    }


def sidecar_config(job: Job) -> MemorydConfig | None:
    """Return what the daemon is told, None without one."""
    drain_s = _DRAIN_S if job.memoryd and job.memoryd.store else None
    # Under HyperPod's operator peers are known once the agent is started, which starts the daemon.
    return memoryd_config(job, drain_s=drain_s, is_external=job.k8s.has_indexed_pods)


def sidecar_peers(job: Job, cluster: K8sCluster) -> str:
    """Return where the daemons of a plain Job's pods are found, a line each."""
    if not (job.memoryd and cluster.has_indexed_pods):
        return ""
    names = [pod_name(job, cluster, index) for index in range(num_pods(job, cluster))]
    return "".join(f"{name}={name}.{job.name}:{peer_port(job.memoryd)}\n" for name in names)


def shm_size(job: Job) -> str | None:
    """Return the size of the pods' /dev/shm, None where it stays as the cluster has it."""
    if job.memoryd:
        return f"{shm_mib(job)}Mi"
    return f"{job.resources.shm_gib}Gi" if job.resources.shm_gib else None
