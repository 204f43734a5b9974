"""Where a job runs, as a recipe or a team's cluster file writes it.

One class a cluster kind. Values are checked here one by one; rules that join
a cluster's fields with the rest of the job are in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from launcher.job.fields import (
    AbsolutePath,
    Count,
    DnsLabel,
    DnsSubdomain,
    EnvName,
    Image,
    LabelKey,
    LabelValue,
    OneLine,
    Section,
    ShellText,
    Whole,
)

Port = Annotated[int, Field(ge=1024, le=65535)]


class FileSecret(Section):
    """A secret for a Slurm or local run: only where it is, never what it is."""

    file: AbsolutePath | None = None
    """A file of mode 0600 that holds the value; null takes the exported variable."""


class SecretKey(Section):
    """A key of a Kubernetes Secret in the job's namespace."""

    name: DnsSubdomain
    key: LabelKey


class LocalCluster(Section):
    """This machine: each node is a process group of its own."""

    kind: Literal["local"]
    secrets: dict[EnvName, FileSecret]


class SlurmContainer(Section):
    """A container that pyxis and enroot start."""

    image: OneLine
    mounts: tuple[OneLine, ...]
    """Each as source:destination or source:destination:flags."""
    mount_home: bool


class SlurmCluster(Section):
    """A Slurm cluster, HyperPod's among them; null leaves an option to Slurm's default."""

    kind: Literal["slurm"]
    partition: OneLine | None
    account: OneLine | None
    qos: OneLine | None
    reservation: OneLine | None
    constraint: OneLine | None
    exclude: OneLine | None
    comment: OneLine | None
    exclusive: bool
    requeue: bool
    signal_before_end_s: Count | None
    """Send SIGTERM to the workers this long before the time limit."""
    container: SlurmContainer | None
    modules: tuple[OneLine, ...]
    python: OneLine
    rdzv_host: OneLine | None
    """Address of the first node, where its name does not resolve."""
    rdzv_port: Port | None
    """null derives one from the job id."""
    pre_script: ShellText | None
    """Shell lines that run once a node before the workers start."""
    secrets: dict[EnvName, FileSecret]
    extra_options: dict[OneLine, OneLine]
    """Further sbatch options without their dashes, such as {switches: '1'}."""


class PersistentVolumeClaim(Section):
    """A claim that exists in the namespace."""

    claim_name: DnsSubdomain
    mount_path: AbsolutePath
    read_only: bool = False


class HostPath(Section):
    """A folder or file of the node."""

    path: AbsolutePath
    mount_path: AbsolutePath
    type: Literal["", "Directory", "DirectoryOrCreate", "File", "FileOrCreate"] = "Directory"
    read_only: bool = False


class Toleration(Section):
    """A Kubernetes toleration."""

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_s: Whole | None = None


class PreferredNodes(Section):
    """Labels that a node should have, weighed against others."""

    weight: Annotated[int, Field(ge=1, le=100)]
    labels: dict[LabelKey, tuple[LabelValue, ...]]


class Affinity(Section):
    """Which nodes the pods go to, and how near to each other."""

    required: dict[LabelKey, tuple[LabelValue, ...]]
    """Labels that a node must have, each with the values allowed."""
    preferred: tuple[PreferredNodes, ...]
    same_topology: LabelKey | None
    """Node label whose value the pods should share, such as a network layer."""


class Probe(Section):
    """A command that says whether a worker pod is alive or ready."""

    command: Annotated[tuple[ShellText, ...], Field(min_length=1)]
    initial_delay_s: Whole = 0
    period_s: Count = 10
    timeout_s: Count = 1
    failure_threshold: Count = 3


class Probes(Section):
    """The pods' probes; null leaves one out."""

    startup: Probe | None
    liveness: Probe | None
    readiness: Probe | None


class SecurityContext(Section):
    """Rights of the container; nothing is given that is not asked for."""

    privileged: bool
    run_as_user: Whole | None
    run_as_group: Whole | None
    fs_group: Whole | None
    capabilities: tuple[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], ...]
    """Linux capabilities to add, such as IPC_LOCK."""


class RestartPolicy(Section):
    """HyperPod: how many restarts within which period."""

    eval_period_s: Count
    full_job_restarts_max: Whole | None
    restarts_before_full_job: Whole | None
    repeat_offenders_to_avoid_max: Whole | None
    scale_up_snooze_s: Whole | None


class LogRule(Section):
    """HyperPod: what a worker's log has to say, and how often."""

    name: DnsLabel
    pattern: OneLine
    """A regular expression with at most one group, which captures a number."""
    start_cutoff_s: Count | None = None
    recurring_s: Count | None = None
    metric_threshold: int | None = None
    operator: Literal["gt", "lt", "eq", "gteq", "lteq"] | None = None
    metric_points: Count | None = None
    stop_pattern: OneLine | None = None


class RunPolicy(Section):
    """How the cluster keeps, restarts and cleans up the job."""

    clean_pod_policy: Literal["All", "OnlyComplete", "None"] | None
    """HyperPod: which pods of a finished job to delete; null is All."""
    retries_max: Whole | None
    fault_deadline_s: Count | None
    startup_deadline_s: Count | None
    ttl_s: Annotated[int, Field(ge=-1)] | None
    """Seconds until a finished job is deleted; -1 keeps it."""
    suspend: bool
    workload_mode: OneLine | None
    restart_policy: RestartPolicy | None
    log_monitoring: tuple[LogRule, ...]


class K8sCluster(Section):
    """A Kubernetes cluster from 1.24, or HyperPod on EKS."""

    kind: Literal["k8s"]
    job_kind: Literal["hyperpod", "job"]
    namespace: DnsLabel
    image: Image
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    image_pull_secrets: tuple[DnsSubdomain, ...]
    service_account: DnsSubdomain | None
    priority_class: DnsSubdomain | None
    queue: DnsSubdomain | None
    """Kueue's LocalQueue."""
    queue_priority: DnsSubdomain | None
    """Kueue's WorkloadPriorityClass."""
    labels: dict[LabelKey, LabelValue]
    annotations: dict[LabelKey, str]
    node_selector: dict[LabelKey, LabelValue]
    affinity: Affinity
    tolerations: tuple[Toleration, ...]
    host_network: bool
    termination_grace_s: Count
    secrets: dict[EnvName, SecretKey]
    secrets_from: tuple[DnsSubdomain, ...]
    """Secrets whose keys all become variables."""
    volume_claims: tuple[PersistentVolumeClaim, ...]
    host_paths: tuple[HostPath, ...]
    run_path: AbsolutePath
    """Events and checkpoints go to a folder of the job's name in this one."""
    python: OneLine | None
    """Of a plain Job; null is python. HyperPod's agent has its own."""
    pre_script: ShellText | None
    """Shell lines that run once a pod before the workers start."""
    probes: Probes
    security: SecurityContext
    run_policy: RunPolicy
    num_spares: Whole
    rdzv_port: Port | None
    """Of a plain Job; null is 29500. HyperPod's agent has its own."""


Cluster = Annotated[LocalCluster | SlurmCluster | K8sCluster, Field(discriminator="kind")]
