"""Rules that join a cluster's fields with each other and with the rest of the job.

What a kind of cluster has no place for is refused here rather than dropped
while rendering. Nothing here reads anything but the job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from launcher.job.cluster import K8sCluster, LogRule, SlurmCluster, Toleration
from launcher.job.content import JobContent
from launcher.job.recovery_rules import one_node_rules
from launcher.job.tiered_memory import requested_memory_gib, tiered_mib

REPLICA_NAME = "pods"
"""HyperPod's operator names pods <job>-<this>-<index>."""
REPLICATED_JOB = "node"
"""JobSet names the Job of a TrainJob <job>-<this>-0; Trainer knows pods of this name as nodes."""


def variable_keys(job: JobContent) -> list[str]:
    """Return the keys of the variables that a job gives its workers."""
    secrets = (f"cluster.secrets.{name}" for name in sorted(job.cluster.secrets))
    return [*(f"env.{name}" for name in sorted(job.env)), *secrets]


def slurm_rules(job: JobContent) -> Iterator[str]:
    """Yield what a job on Slurm may not ask for."""
    if not isinstance(cluster := job.cluster, SlurmCluster):
        return
    for name in cluster.extra_options:
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            yield (
                f"cluster.extra_options has the name {name!r}; allowed: a long sbatch option "
                "without its dashes"
            )
        elif name in RESERVED_SBATCH_OPTIONS:
            yield (
                f"cluster.extra_options.{name} is written by the template; "
                "use the recipe's own key for it"
            )
    # Names of the sort that Slurm splits at commas and blanks.
    for field in ("partition", "account", "qos", "reservation"):
        value = getattr(cluster, field)
        if value is not None and not re.fullmatch(r"[\w.,@+-]+", value):
            yield f"cluster.{field} {value!r} is no Slurm name; allowed: letters, digits and _.,@+-"

    if cluster.requeue_at_limit:
        yield from _limit_rules(job, cluster)


def requeues_at_limit(job: JobContent) -> bool:
    """Return whether a job that its time limit has ended goes back into Slurm's queue."""
    cluster = job.cluster
    if not isinstance(cluster, SlurmCluster) or cluster.requeue_at_limit is False:
        return False
    # On other nodes a start finds nothing of what memory alone has held: that is a person's choice.
    tiered = job.resilience.tiered
    is_chosen = cluster.requeue_at_limit or bool(tiered and tiered.store)
    return is_chosen and not any(_limit_rules(job, cluster))


def _limit_rules(job: JobContent, cluster: SlurmCluster) -> Iterator[str]:
    """Yield what a job lacks that is to go on when its time limit has ended it."""
    where = "cluster.requeue_at_limit true"
    if not cluster.requeue:
        yield f"{where} needs cluster.requeue true, without which Slurm queues no job again"
    if cluster.signal_before_end_s is None:
        yield f"{where} needs cluster.signal_before_end_s, the time to save the last step in"
    if job.resilience.tiered is None:
        yield (
            f"{where} needs resilience.tiered, without which the next start would begin at step "
            "0; choose resilience/tiered=NAME"
        )


RESERVED_SBATCH_OPTIONS = frozenset(
    {
        "job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem",
        "partition", "account", "qos", "reservation", "constraint", "exclude", "comment",
        "exclusive", "requeue", "no-requeue", "signal", "time", "output", "error", "open-mode",
        "chdir", "wrap", "array", "parsable", "wait", "test-only",
    }
)  # fmt: skip


def k8s_rules(job: JobContent) -> Iterator[str]:
    """Yield what a job on Kubernetes may not ask for."""
    if not isinstance(cluster := job.cluster, K8sCluster):
        return
    yield from _names(job, cluster)
    if cluster.has_indexed_pods:
        yield from _indexed_job(job, cluster)
    else:
        yield from _hyperpod_job(job, cluster)
    yield from _reserved(job, cluster)
    yield from _users(cluster)
    yield from _memory_limit(job, cluster)
    for toleration in cluster.tolerations:
        yield from _toleration(toleration)
    yield from _network_peers(cluster)
    paths = cluster.mount_paths()
    if job.resources.shm_gib or job.memoryd:
        paths.append("/dev/shm")
    if "/" in paths:
        yield "cluster mounts '/', which would hide all of the image; choose another mount_path"
    for path in paths:
        if any(PurePosixPath(path).is_relative_to(own) for own in _OWN_MOUNTS):
            yield f"cluster mounts {path!r}, where the job itself is mounted; choose another path"
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield f"cluster.volume_claims and cluster.host_paths mount {path!r} twice"
    for rule in cluster.run_policy.log_monitoring:
        yield from _log_rule(rule)


def _names(job: JobContent, cluster: K8sCluster) -> Iterator[str]:
    last = num_pods(job, cluster) - 1
    longest, what = pod_name(job, cluster, last), "pod"
    if cluster.job_kind == "trainjob":
        # JobSet wants room for what Kubernetes puts behind a pod's host name.
        longest += "-xxxxx"
    elif last >= num_base_pods(job, cluster):
        longest, what = growth_name(job.name, last), "Job"
    if len(longest) > 63:
        yield (
            f"run.name {job.name!r} is too long: the {what} {longest!r} has {len(longest)} "
            "characters; allowed: 63"
        )


def _network_peers(cluster: K8sCluster) -> Iterator[str]:
    for number, peer in enumerate(cluster.network_policy_from):
        if (peer.cidr is None) == (peer.namespace_labels is None and peer.pod_labels is None):
            yield (
                f"cluster.network_policy_from.{number} is no peer; allowed: cidr, or "
                "namespace_labels, pod_labels or both"
            )


def _users(cluster: K8sCluster) -> Iterator[str]:
    own, user = cluster.security, cluster.security.run_as_user
    if own.privileged and (own.dropped_capabilities or not own.allow_privilege_escalation):
        yield (
            "cluster.security.privileged true gives workers every right; allowed with it: "
            "allow_privilege_escalation true and dropped_capabilities []"
        )
    added = [*(own.capabilities or ())]
    if added and user != 0:
        yield f"cluster.security.capabilities {added} needs run_as_user 0: only root gets any"
    if both := sorted({*added} & {*own.dropped_capabilities}):
        yield f"cluster.security.capabilities and dropped_capabilities have {both}; allowed: one"
    if user == 0 and cluster.security.run_as_non_root:
        yield (
            "cluster.security.run_as_user 0 with run_as_non_root true: no node starts such a pod; "
            "allowed: another user, or run_as_non_root null"
        )
    if user and cluster.security.fs_group is None:
        yield (
            f"cluster.security.run_as_user {user} needs cluster.security.fs_group, a group that "
            "may read the run's token; Kubernetes gives the file to root"
        )


def _memory_limit(job: JobContent, cluster: K8sCluster) -> Iterator[str]:
    limit_gib, most_gib = cluster.security.memory_limit_gib, job.instance.memory_gib
    # Under HyperPod's operator the checkpoint daemon is in the workers' container.
    daemon_gib = 0 if cluster.has_indexed_pods else math.ceil(tiered_mib(job) / 1024)
    least_gib = max(requested_memory_gib(job) or 1, job.resources.shm_gib + daemon_gib)
    if limit_gib is not None and not least_gib <= limit_gib <= most_gib:
        yield (
            f"cluster.security.memory_limit_gib {limit_gib}; allowed: {least_gib}, which is "
            f"requested or in /dev/shm, to {most_gib}, which is instance.memory_gib"
        )


def num_pods(job: JobContent, cluster: K8sCluster) -> int:
    """Return how many pods a job has at most; some may wait without a rank."""
    if cluster.has_indexed_pods:
        return job.num_nodes_max
    return job.trainer.num_nodes + cluster.num_spares


def num_base_pods(job: JobContent, cluster: K8sCluster) -> int:
    """Return how many of them are the job's own: each further one of a plain Job has its own Job.

    An elastic run never goes on with fewer nodes.
    """
    elastic = job.resilience.elastic
    if not cluster.has_indexed_pods:
        return num_pods(job, cluster)
    return elastic.nodes_min if elastic else job.num_nodes_started


def growth_name(name: str, index: int) -> str:
    """Return the name of the Job that a further node of an elastic run has for itself."""
    return f"{name}-g{index}"


def pods_name(job: JobContent, cluster: K8sCluster) -> str:
    """Return what the names of all pods begin with; that of the Job which indexes them, if any."""
    group = {"hyperpod": f"-{REPLICA_NAME}", "trainjob": f"-{REPLICATED_JOB}-0"}
    return f"{job.name}{group.get(cluster.job_kind, '')}"


def pod_name(job: JobContent, cluster: K8sCluster, index: int) -> str:
    """Return the name of a pod."""
    return f"{pods_name(job, cluster)}-{index}"


_HYPERPOD_POLICY = (
    "clean_pod_policy", "fault_deadline_s", "startup_deadline_s", "workload_mode",
    "restart_policy", "log_monitoring",
)  # fmt: skip


def _indexed_job(job: JobContent, cluster: K8sCluster) -> Iterator[str]:
    policy = cluster.run_policy
    hyperpod_only = {"num_spares": cluster.num_spares, "operator_from": cluster.operator_from}
    policies = {f"run_policy.{name}": getattr(policy, name) for name in _HYPERPOD_POLICY}
    yield from _unread(hyperpod_only | policies, "hyperpod", "a plain Job has no such field")
    if job.name[0].isdigit():
        yield (
            f"run.name {job.name!r} begins with a digit, and a plain Job's Service may not; "
            "begin it with a letter"
        )
    is_queued, tiered = cluster.job_kind == "trainjob" and cluster.queue, job.resilience.tiered
    if is_queued and not (tiered and tiered.store):
        field = "resilience.tiered.store" if tiered else "resilience.tiered"
        yield (
            f"cluster.queue {cluster.queue!r} needs {field} with cluster.job_kind 'trainjob': "
            "Kueue may delete all pods, with what their memory holds, and make them again; "
            "allowed: resilience/tiered=run_folder, folder, s3 or store"
        )


def _hyperpod_job(job: JobContent, cluster: K8sCluster) -> Iterator[str]:
    policy = cluster.run_policy
    ports = {"rdzv_port": cluster.rdzv_port}
    yield from _unread(ports, "job", "HyperPod's operator names the port")
    growth = {"growth_priority_class": cluster.growth_priority_class}
    yield from _unread(growth, "job", "HyperPod's operator makes one job of all nodes")
    if standby := job.resilience.standby_nodes:
        yield (
            f"resilience.checkpointless.standby_nodes {standby} needs cluster.job_kind 'job'; "
            "HyperPod's own nodes that stand by are cluster.num_spares"
        )
    restart_policy, elastic = policy.restart_policy, job.resilience.elastic
    if elastic and restart_policy and restart_policy.scale_up_snooze_s is not None:
        yield (
            "cluster.run_policy.restart_policy.scale_up_snooze_s "
            f"{restart_policy.scale_up_snooze_s} is set by resilience.elastic.scale_up_snooze_s "
            f"{elastic.scale_up_snooze_s:g} with resilience.elastic; allowed: null"
        )
    if job.resizes_by_restart:
        yield from _resized_job(job)


def _resized_job(job: JobContent) -> Iterator[str]:
    """Yield why a start at another size would not find the state of the one before."""
    where, tiered = "resilience.elastic with cluster.job_kind 'hyperpod'", job.resilience.tiered
    lacking = None
    if tiered is None or tiered.store is None:
        lacking = f"resilience.tiered{'.store' if tiered else ''} null"
    elif tiered.backend != "memoryd":
        lacking = f"resilience.tiered.backend {tiered.backend!r}"
    if tiered is None or lacking:
        yield (
            f"{lacking} does not fit {where}, where a start at another size finds the state in "
            "a store of ours alone; allowed: resilience/tiered=run_folder, folder, s3 or store"
        )
        return
    for field, value, allowed in (
        ("replicas", tiered.ram.replicas, 0),
        ("domains_min", tiered.ram.domains_min, 1),
    ):
        if value != allowed:
            yield (
                f"resilience.tiered.ram.{field} {value} does not fit {where}, where no node's "
                f"memory reaches another's; allowed: {allowed}"
            )
    if job.training:
        yield from one_node_rules(job.training, where)


def _unread(values: Mapping[str, object], job_kind: str, why: str) -> Iterator[str]:
    for name, value in values.items():
        if value:
            yield f"cluster.{name} needs cluster.job_kind {job_kind!r}; {why}"


def _reserved(job: JobContent, cluster: K8sCluster) -> Iterator[str]:
    """Yield what the manifest sets itself and a recipe would set again."""
    for field in ("labels", "annotations"):
        for key in getattr(cluster, field):
            if key in _OWN_KEYS or key.startswith("training-recipes/"):
                yield f"cluster.{field} has {key!r}, which the manifest sets itself; remove it"
    for key in variable_keys(job):
        if key.rpartition(".")[2] in _OWN_VARIABLES:
            yield (
                f"{key} is set by the manifest itself; remove it "
                "(OMP_NUM_THREADS is trainer.threads_per_worker)"
            )
    given = cluster.node_selector.get("node.kubernetes.io/instance-type")
    if given is not None and given != job.instance.type:
        yield (
            f"cluster.node_selector asks for node.kubernetes.io/instance-type {given!r}, and "
            f"instance.type is {job.instance.type!r}; choose with instance=NAME alone"
        )


_OWN_KEYS = {
    "app.kubernetes.io/name",
    "app.kubernetes.io/managed-by",
    "kueue.x-k8s.io/queue-name",
    "kueue.x-k8s.io/priority-class",
}
_OWN_VARIABLES = {"OMP_NUM_THREADS", "LAUNCHER_POD_NAME", "LAUNCHER_POD_IP", "LAUNCHER_JOB_UID"}
_OWN_MOUNTS = ("/etc/training", "/etc/training-token")


def _toleration(toleration: Toleration) -> Iterator[str]:
    where = f"cluster.tolerations {toleration.key!r}"
    if toleration.operator == "Exists" and toleration.value is not None:
        yield f"{where}: value {toleration.value!r} needs operator 'Equal'"
    if toleration.operator == "Equal" and toleration.key is None:
        yield f"{where}: operator 'Equal' needs a key"
    if toleration.toleration_s is not None and toleration.effect != "NoExecute":
        yield f"{where}: toleration_s {toleration.toleration_s} needs effect 'NoExecute'"


def _log_rule(rule: LogRule) -> Iterator[str]:
    where = f"cluster.run_policy.log_monitoring '{rule.name}'"
    for field in ("pattern", "stop_pattern"):
        text = getattr(rule, field)
        try:
            groups = re.compile(text).groups if text else 0
        except re.error as error:
            yield f"{where}: {field} {text!r} is no regular expression: {error}"
            continue
        if groups > 1:
            yield f"{where}: {field} {text!r} has {groups} groups; allowed: at most 1"
    if (rule.metric_threshold is None) != (rule.operator is None):
        yield f"{where}: metric_threshold and operator go together; set both or neither"
