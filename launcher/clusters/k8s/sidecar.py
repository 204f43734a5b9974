"""The checkpoint daemon of a pod: a container beside that of the workers.

The token that all doors ask for is in a Secret, whose value no rendered file holds, since
manifests are looked at and committed. `token_secret` is what a submission creates.
"""

from __future__ import annotations

import json
import secrets
import shlex
from typing import Any

from launcher.clusters.k8s.start import CONFIG_PATH, POD_NAME
from launcher.clusters.memoryd import (
    PEER_PORT,
    memoryd_config,
    memoryd_settings,
    token_secret_name,
)
from launcher.job import Job
from launcher.job.cluster import K8sCluster
from launcher.job.tiered_memory import budget_mib, tiered_mib
from launcher.rundir import NODE_FILE
from resilience.node_config import MemorydConfig
from resilience.settings import TieredSettings

K8S_NODE = "LAUNCHER_K8S_NODE"
"""Variable with the name of the pod's node, which is what fails together."""
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
_SECRET_PATH = "/etc/training-token"
_SECRET_KEY = "token"


def sidecar_values(job: Job) -> dict[str, Any] | None:
    """Return what the template of the daemon's container is filled with, None without one."""
    settings, cluster = memoryd_settings(job), job.cluster
    assert isinstance(cluster, K8sCluster)
    if settings is None:
        return None
    return {
        "port": _port(settings),
        "memory": f"{tiered_mib(job)}Mi",
        "secret": _secret(job, settings, cluster),
        "folder": _FOLDER,
        "end_s": _DRAIN_S + _CLOSE_S if settings.store else 0,
        "aws_host": AWS_HOST if settings.http_port else None,
    }


def sidecar_config(job: Job) -> MemorydConfig | None:
    """Return what the daemon is told, None without one."""
    has_store = job.resilience.tiered is not None and job.resilience.tiered.store is not None
    return memoryd_config(job, drain_s=_DRAIN_S if has_store else None, is_external=True)


def sidecar_files(job: Job) -> dict[str, Any]:
    """Return the daemon's command for its script, and where the others' are, by file name."""
    settings, cluster = memoryd_settings(job), job.cluster
    assert isinstance(cluster, K8sCluster)
    if settings is None:
        return {}
    names = _names(job, cluster)
    peers = [f"{name}={_host(job, cluster, name)}:{_port(settings)}\n" for name in names]
    is_job = cluster.job_kind == "job"
    node = f'{job.name}-"$JOB_COMPLETION_INDEX"' if is_job else f'"${POD_NAME}"'
    command = [
        shlex.quote(cluster.python or "python"),
        "-m",
        "resilience.tiered.memoryd",
        f"--config={CONFIG_PATH}/{NODE_FILE}",
        '--dir="$MEMORYD_DIR"',
        '--token-file="$MEMORYD_TOKEN_FILE"',
        f"--node={node}",
        f'--domain="${K8S_NODE}"',
    ]
    if job.num_nodes_started > 1:
        command.append(f"--peer-listen=0.0.0.0:{_port(settings)}")
        command.append(f"--peers-file={CONFIG_PATH}/{PEERS_FILE}")
    return {
        "config_path": CONFIG_PATH,
        "has_pre_script": cluster.pre_script is not None,
        "command": command,
        "peers": "".join(peers),
    }


def sidecar_variables(job: Job) -> dict[str, str]:
    """Return the variables by which workers and daemon find each other, {} without a daemon."""
    settings = memoryd_settings(job)
    if settings is None:
        return {}
    made = f"{_SECRET_PATH}/{_SECRET_KEY}"
    return {"MEMORYD_DIR": _FOLDER, "MEMORYD_TOKEN_FILE": settings.token_file or made}


def shm_size(job: Job) -> str | None:
    """Return the size of the pods' /dev/shm, None where it stays as the cluster has it."""
    shm_gib, settings = job.resources.shm_gib, memoryd_settings(job)
    if settings is None:
        return f"{shm_gib}Gi" if shm_gib else None
    return f"{shm_gib * 1024 + budget_mib(job, settings)}Mi"


def token_secret(job: Job, owner: dict[str, str]) -> str:
    """Return a Secret with a new token, as JSON.

    It belongs to `owner` (apiVersion, kind, name, uid), and is removed with it.
    """
    cluster = job.cluster
    assert isinstance(cluster, K8sCluster)
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": token_secret_name(job),
                "namespace": cluster.namespace,
                "ownerReferences": [owner],
            },
            "stringData": {_SECRET_KEY: secrets.token_hex(32)},
        }
    )


def _secret(job: Job, settings: TieredSettings, cluster: K8sCluster) -> dict[str, Any] | None:
    if settings.token_file:
        return None
    # Kubernetes gives the file to root, and to fs_group where there is one. Without run_as_user
    # the image says who runs, which may be anybody.
    security = cluster.security
    is_owner = security.run_as_user == 0 or security.fs_group is not None
    mode = 0o400 if is_owner else 0o444
    return {"name": token_secret_name(job), "mount_path": _SECRET_PATH, "mode": mode}


def _port(settings: TieredSettings) -> int:
    return settings.peer_port or PEER_PORT


def _names(job: Job, cluster: K8sCluster) -> list[str]:
    if cluster.job_kind == "job":
        return [f"{job.name}-{index}" for index in range(job.num_nodes_started)]
    number = job.trainer.num_nodes + cluster.num_spares
    return [f"{job.name}-pods-{index}" for index in range(number)]


def _host(job: Job, cluster: K8sCluster, name: str) -> str:
    # HyperPod's operator, which such a job is not submitted to yet, gives pods no subdomain.
    return f"{name}.{job.name}" if cluster.job_kind == "job" else name
