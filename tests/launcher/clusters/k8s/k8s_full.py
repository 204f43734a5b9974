"""A job that uses every field of a Kubernetes cluster that its kind has a place for."""

from __future__ import annotations

from launcher.job import Job
from tests.launcher.k8s_job import LARGE, k8s_job

PROBE = {"command": ["cat", "/x"], "period_s": 5}
FULL = {
    "time_limit": "1-00:00:01",
    "env": {
        "NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa",
        # Variables of the launcher's own, which the tests of single ones do without.
        "CUDA_DEVICE_MAX_CONNECTIONS": None, "FI_EFA_SET_CUDA_SYNC_MEMOPS": None,
        "NCCL_SOCKET_IFNAME": None, "PYTORCH_CUDA_ALLOC_CONF": None,
    },
    "cluster.labels": {"team": "x"},
    "cluster.annotations": {"a/b": "c"},
    "cluster.service_account": "trainer",
    "cluster.priority_class": "high",
    "cluster.queue": "q",
    "cluster.queue_priority": "p",
    "cluster.node_selector": {"zone": "1"},
    "cluster.affinity.required": {"b": ["2", "3"], "a": ["1"]},
    "cluster.affinity.preferred": [
        {"weight": 7, "labels": {"a": ["1"]}}, {"weight": 9, "labels": {"b": ["2"]}},
    ],
    "cluster.affinity.same_topology": "layer",
    "cluster.tolerations": [
        {"key": "k", "effect": "NoExecute", "toleration_s": 3},
        {"key": "k", "operator": "Equal", "value": "v"},
    ],
    "cluster.host_network": True,
    "cluster.image_pull_secrets": ["pull"],
    "cluster.secrets": {"HUB": {"name": "hub", "key": "token"}},
    "cluster.secrets_from": ["hub"],
    "cluster.volume_claims": [{"claim_name": "fsx", "mount_path": "/data", "read_only": True}],
    "cluster.host_paths": [
        {"path": "/nvme", "mount_path": "/scratch", "type": "DirectoryOrCreate"},
    ],
    "cluster.pre_script": "ulimit -l unlimited\n",
    "cluster.probes": {"startup": PROBE, "liveness": PROBE, "readiness": PROBE},
    "cluster.security": {
        "privileged": True, "run_as_user": 0, "run_as_group": 1, "fs_group": 1,
        "capabilities": ["IPC_LOCK"], "run_as_non_root": None,
        "seccomp_profile": "RuntimeDefault", "allow_privilege_escalation": True,
        "dropped_capabilities": [], "service_account_token": False, "memory_limit_gib": 2048,
    },
    "cluster.run_policy.retries_max": 10,
    "cluster.run_policy.ttl_s": 60,
    "cluster.run_policy.suspend": True,
    "resources.num_cpus": 8,
}  # fmt: skip
HYPERPOD_ONLY = {
    "cluster.num_spares": 1,
    "cluster.run_policy.clean_pod_policy": "OnlyComplete",
    "cluster.run_policy.fault_deadline_s": 5,
    "cluster.run_policy.startup_deadline_s": 6,
    "cluster.run_policy.workload_mode": "Deployment",
    "cluster.run_policy.restart_policy": {
        "eval_period_s": 1, "full_job_restarts_max": 2, "restarts_before_full_job": 3,
        "repeat_offenders_to_avoid_max": 4, "scale_up_snooze_s": None,
    },
    "cluster.run_policy.log_monitoring": [
        {
            "name": "a", "pattern": "a", "start_cutoff_s": 1, "recurring_s": 2,
            "metric_threshold": -3, "operator": "gt", "metric_points": 4, "stop_pattern": "b",
        },
        {"name": "b", "pattern": "b"},
    ],
    # A node has a whole copy.
    "trainer.num_replicas": 16,
    "name": "llama3-70b-pretrain",
    "resources.memory_gib": 1024,
    "resilience.elastic": {
        "nodes_min": 8, "nodes_max": 16, "nodes_step": 8, "nodes_allowed": None,
        "may_lose_steps": False, "hold_s": 1.0, "scale_up_snooze_s": 2.1,
        "scaling_timeout_s": 3, "graceful_shutdown_timeout_s": 4, "faulty_scale_down_timeout_s": 5,
    },
}  # fmt: skip


def full_job(kind: str) -> Job:
    if kind == "hyperpod":
        return k8s_job(kind, FULL | HYPERPOD_ONLY, "llama/llama3_8b_pretrain")
    return k8s_job(kind, FULL, LARGE)
