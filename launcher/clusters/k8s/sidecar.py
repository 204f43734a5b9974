"""The checkpoint daemon of a pod: a container beside that of the workers."""

from __future__ import annotations

import shlex
from typing import Any

from launcher.clusters.k8s.start import CONFIG_PATH, K8S_NODE, node_name, peer_port, run_path
from launcher.clusters.k8s.token import token_path
from launcher.clusters.memoryd import memoryd_config
from launcher.job import Job
from launcher.job.cluster import K8sCluster
from launcher.job.cluster_rules import num_pods, pod_name
from launcher.job.tiered_memory import shm_mib, tiered_mib
from launcher.rundir import NODE_FILE
from resilience.node_config import MemorydConfig

K8S_NAMESPACE = "LAUNCHER_K8S_NAMESPACE"
"""Variable with the pod's namespace: a run's folder has one path in each."""
PEERS_FILE = "memoryd.peers"
AWS_HOST = "ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local"
"""Where AWS's library looks for a daemon."""

# Each pod has a /dev/shm of its own.
_FOLDER = "/dev/shm/memoryd"
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
        "folder": _FOLDER,
        "end_s": _DRAIN_S + _CLOSE_S if settings.store else 0,
        "aws_host": AWS_HOST if settings.http_port else None,
    }


def sidecar_config(job: Job) -> MemorydConfig | None:
    """Return what the daemon is told, None without one."""
    drain_s = _DRAIN_S if job.memoryd and job.memoryd.store else None
    # Under HyperPod's operator peers are known once the agent is started, which starts the daemon.
    return memoryd_config(job, drain_s=drain_s, is_external=job.k8s.has_indexed_pods)


def sidecar_files(job: Job, cluster: K8sCluster) -> dict[str, Any]:
    """Return the daemon's command for its script, and where the others' are, by file name."""
    settings = job.memoryd
    if settings is None or not cluster.has_indexed_pods:
        return {}
    names = [pod_name(job, cluster, index) for index in range(num_pods(job, cluster))]
    peers = [f"{name}={name}.{job.name}:{peer_port(settings)}\n" for name in names]
    command = [
        shlex.quote(cluster.python or "python"),
        "-m",
        "resilience.tiered.memoryd",
        f"--config={CONFIG_PATH}/{NODE_FILE}",
        '--dir="$MEMORYD_DIR"',
        f"--run-dir={shlex.quote(run_path(job, cluster))}",
        '--token-file="$MEMORYD_TOKEN_FILE"',
        *(("--tls",) if cluster.tls else ()),
        f"--node={node_name(job, cluster)}",
        f'--domain="${K8S_NODE}"',
    ]
    if job.num_nodes_max > 1:
        command.append(f"--peer-listen=0.0.0.0:{peer_port(settings)}")
        command.append(f"--peers-file={CONFIG_PATH}/{PEERS_FILE}")
    return {
        "config_path": CONFIG_PATH,
        "has_pre_script": cluster.pre_script is not None,
        "run_path": run_path(job, cluster),
        "command": command,
        "peers": "".join(peers),
    }


def sidecar_variables(job: Job) -> dict[str, str]:
    """Return the variables by which workers and daemon find each other, {} without a daemon."""
    if job.memoryd is None:
        return {}
    return {"MEMORYD_DIR": _FOLDER, "MEMORYD_TOKEN_FILE": token_path(job)}


def shm_size(job: Job) -> str | None:
    """Return the size of the pods' /dev/shm, None where it stays as the cluster has it."""
    if job.memoryd:
        return f"{shm_mib(job)}Mi"
    return f"{job.resources.shm_gib}Gi" if job.resources.shm_gib else None
