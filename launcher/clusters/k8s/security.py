"""Rights of the pods on their nodes, and the level of PodSecurity that admits them. Pure."""

from __future__ import annotations

from typing import Any

from launcher.job import Job
from launcher.job.cluster import K8sCluster
from launcher.job.workload import Instance, TrainerSettings

_BASELINE = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
"""Capabilities that a container may add at the level `baseline`."""


def efa_devices(trainer: TrainerSettings, instance: Instance, num_nodes: int) -> int:
    """Return the EFA devices for a pod: all of a whole instance, else the GPUs' share.

    The share is rounded down, so that pods of one kind fit side by side; where
    nodes have to talk, it is one device at least.
    """
    share = instance.num_efa * trainer.num_devices // instance.num_devices
    return max(share, min(instance.num_efa, 1)) if num_nodes > 1 else share


def pod_security(cluster: K8sCluster) -> dict[str, Any]:
    """Return the security context of a pod."""
    own = cluster.security
    fields = {
        # No job has run_as_non_root true with run_as_user 0.
        "runAsNonRoot": (own.run_as_non_root is not False and own.run_as_user != 0) or None,
        "runAsUser": own.run_as_user,
        "runAsGroup": own.run_as_group,
        "fsGroup": own.fs_group,
        # A claim of many files is not walked through at each start of a pod.
        "fsGroupChangePolicy": None if own.fs_group is None else "OnRootMismatch",
        "seccompProfile": {"type": own.seccomp_profile} if own.seccomp_profile else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def daemon_security(cluster: K8sCluster) -> dict[str, Any]:
    """Return the security context of a container that needs no rights of its own.

    What a privileged container asks for is for the workers alone.
    """
    own = cluster.security
    dropped = ("ALL",) if own.privileged else own.dropped_capabilities
    fields: dict[str, Any] = {"capabilities": {"drop": dropped}} if dropped else {}
    may_escalate = own.allow_privilege_escalation and not own.privileged
    return fields if may_escalate else {"allowPrivilegeEscalation": False, **fields}


def workers_security(job: Job, cluster: K8sCluster) -> dict[str, Any]:
    """Return the security context of the workers' container."""
    own = cluster.security
    # A privileged container has every right, and Kubernetes refuses to withhold escalation from it.
    fields: dict[str, Any] = {"privileged": True} if own.privileged else daemon_security(cluster)
    added = own.capabilities if own.privileged else _added_capabilities(job, cluster)
    if added:
        fields["capabilities"] = {**fields.get("capabilities", {}), "add": added}
    return fields


def _added_capabilities(job: Job, cluster: K8sCluster) -> tuple[str, ...]:
    own = cluster.security
    if own.capabilities is not None:
        return own.capabilities
    # EFA's buffers have to stay in memory. A user other than root never gets a capability.
    num_efa = efa_devices(job.trainer, job.instance, job.num_nodes_max)
    return ("IPC_LOCK",) if own.run_as_user == 0 and num_efa else ()


def security_note(job: Job) -> str | None:
    """Say which level of PodSecurity the pods need, and for which keys; None at `restricted`."""
    if not isinstance(job.cluster, K8sCluster):
        return None
    for level, needs in _needs(job, job.cluster).items():
        if keys := [key for key, has in needs if has]:
            namespace = f"a namespace with PodSecurity's level {level!r}, or without one"
            return f"the pods need {namespace}, for {', '.join(keys)}"
    return None


def _needs(job: Job, cluster: K8sCluster) -> dict[str, list[tuple[str, object]]]:
    """Return by level keys, and whether the key keeps the pods out of every stricter level."""
    own, added = cluster.security, set(_added_capabilities(job, cluster))
    beyond, where = sorted(added - _BASELINE), "cluster.security"
    return {
        "privileged": [
            ("cluster.host_network", cluster.host_network),
            ("cluster.host_paths", cluster.host_paths),
            (f"{where}.privileged", own.privileged),
            (f"the capability {' and '.join(beyond)}", beyond),
            (f"{where}.seccomp_profile", own.seccomp_profile == "Unconfined"),
        ],
        "baseline": [
            (f"{where}.seccomp_profile", own.seccomp_profile is None),
            (f"{where}.capabilities", added - {"NET_BIND_SERVICE"}),
            (f"{where}.dropped_capabilities", "ALL" not in own.dropped_capabilities),
            (f"{where}.allow_privilege_escalation", own.allow_privilege_escalation),
            (f"{where}.run_as_user", own.run_as_user == 0),
            (f"{where}.run_as_non_root", own.run_as_non_root is False),
        ],
    }
