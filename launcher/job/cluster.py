"""Where a job runs, as a recipe or a team's cluster file writes it.

One class a cluster kind. Values are checked here one by one; rules that join
a cluster's fields with the rest of the job are in `rules.py`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from launcher.job.fields import (
    AbsolutePath,
    Cidr,
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
    matching,
)

Port = Annotated[int, Field(ge=1024, le=65535)]
RENDEZVOUS_PORT = 29500
"""Of the pods of a plain Job that names none."""


class FileSecret(Section):
    """A secret for a Slurm or local run: only where it is, never what it is."""

    file: AbsolutePath | None = None
    """File of mode 0600 that holds the value; null takes the variable of that name that is exported
    where the job is started."""


class SecretKey(Section):
    """A key of a Kubernetes Secret in the job's namespace."""

    name: DnsSubdomain
    """Name of the Secret, in the job's namespace."""
    key: LabelKey
    """Key in that Secret; its value becomes the variable."""


class _Encrypted(Section):
    """Settings of the connections between nodes, for each kind of cluster."""

    tls: bool = False
    """Whether agents and checkpoint daemons encrypt their connections to other nodes, with keys
    that derive from the run's token; the nodes need cryptography, which the extra tls has."""

    @model_serializer(mode="wrap")
    def _leave_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave tls out where it is false: jobs of earlier versions keep their digest."""
        content: dict[str, Any] = write(self)
        if not self.tls:
            del content["tls"]
        return content


class LocalCluster(_Encrypted):
    """This machine: each node is a process group of its own."""

    kind: Literal["local"]
    """local: the job runs on this machine."""
    secrets: dict[EnvName, FileSecret]
    """Secret variables of the workers: {NAME: {file: /path/of/mode/0600}}, or {NAME: {}} for an
    exported variable."""


class SlurmContainer(Section):
    """A container that pyxis and enroot start."""

    image: OneLine
    """Image as pyxis takes it: a squashfs file on every node, such as /fsx/train.sqsh, or a
    registry's name."""
    mounts: tuple[OneLine, ...]
    """Folders to mount beside the run's own, each as source:destination or
    source:destination:flags."""
    mount_home: bool
    """Whether to mount the user's home folder in the container."""


class SlurmCluster(_Encrypted):
    """A Slurm cluster, HyperPod's among them; null leaves an option to Slurm's default."""

    kind: Literal["slurm"]
    """slurm: the job runs on a Slurm cluster."""
    partition: OneLine | None
    """sbatch --partition; null takes the cluster's default partition."""
    account: OneLine | None
    """sbatch --account, which is charged for the job; null takes the user's default account."""
    qos: OneLine | None
    """sbatch --qos, the quality of service; null takes the account's default."""
    reservation: OneLine | None
    """sbatch --reservation, whose nodes the job takes; null takes none."""
    constraint: OneLine | None
    """sbatch --constraint, the features that each node must have; null asks for none."""
    exclude: OneLine | None
    """sbatch --exclude, the nodes that the job must not get, such as node[1-3]; null excludes
    none."""
    comment: OneLine | None
    """sbatch --comment, a text that is kept with the job; null writes none."""
    exclusive: bool
    """Whether the job shares its nodes with no other job; HyperPod's auto-resume needs true."""
    requeue: bool
    """Whether Slurm queues the job again after a node failed or the job was preempted."""
    signal_before_end_s: Count | None
    """Seconds before the time limit at which the workers get SIGTERM; at most 65535, null sends
    none."""
    requeue_at_limit: bool | None
    """Whether a job that its time limit has ended goes back into the queue, to go on from what its
    checkpoints keep; needs requeue and signal_before_end_s. null: where a store keeps the state and
    both are set."""
    container: SlurmContainer | None
    """Container in which the workers run; null runs them on the node itself."""
    modules: tuple[OneLine, ...]
    """Environment modules to load before the workers start, in this order."""
    python: OneLine
    """Command that starts Python on the nodes, or in the container."""
    rdzv_host: OneLine | None
    """Address at which all nodes reach the first one, or one of loopback where nodes share a
    machine; null takes the names of all nodes, which then have to resolve."""
    rdzv_port: Port | None
    """Port at which the agent of each node is found by the others, counted up where nodes share a
    machine; null derives one from the job's id, 10000 to 19999."""
    pre_script: ShellText | None
    """Shell lines that run on each node before its workers, and before its checkpoint daemon, if
    there is one; null runs none."""
    secrets: dict[EnvName, FileSecret]
    """Secret variables of the workers: {NAME: {file: /path/of/mode/0600}}, or {NAME: {}} for a
    variable that is exported where sbatch is called."""
    extra_options: dict[OneLine, OneLine]
    """Further long options of sbatch without their dashes, such as {switches: '1'}."""


class PersistentVolumeClaim(Section):
    """A claim that exists in the namespace."""

    claim_name: DnsSubdomain
    """Name of a claim that exists in the job's namespace."""
    mount_path: AbsolutePath
    """Absolute path in the container at which the claim's volume is mounted."""
    read_only: bool = False
    """Whether to mount the volume for reading alone."""


class HostPath(Section):
    """A folder or file of the node."""

    path: AbsolutePath
    """Absolute path on the node."""
    mount_path: AbsolutePath
    """Absolute path in the container at which it is mounted."""
    type: Literal["", "Directory", "DirectoryOrCreate", "File", "FileOrCreate"] = "Directory"
    """What has to be at that path; the kinds with OrCreate are made where nothing is, and '' checks
    nothing."""
    read_only: bool = False
    """Whether to mount it for reading alone."""


class Toleration(Section):
    """A Kubernetes toleration."""

    key: LabelKey | None = None
    """Key of the taint; null, with operator Exists, matches every key."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """Exists matches any value of the key; Equal compares it with `value`."""
    value: LabelValue | None = None
    """Value of the taint, with operator Equal; null with Exists."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null matches every effect."""
    toleration_s: Whole | None = None
    """Seconds that a running pod stays once the taint is there, with effect NoExecute; null stays
    for good."""


class NetworkPeer(Section):
    """Other processes that may connect to the pods: by labels, or by their addresses."""

    namespace_labels: dict[LabelKey, LabelValue] | None = None
    """Labels of the namespaces that they run in; null is the job's own namespace, {} all."""
    pod_labels: dict[LabelKey, LabelValue] | None = None
    """Labels of their pods; null is all pods of these namespaces."""
    cidr: Cidr | None = None
    """Their addresses, as 10.0.0.0/8, instead of labels."""


class PreferredNodes(Section):
    """Labels that a node should have, weighed against others."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """How much a node that has the labels counts against others, 1 to 100."""
    labels: dict[LabelKey, tuple[LabelValue, ...]]
    """Labels that the node should have, each with the values allowed: {label: [values]}."""


class Affinity(Section):
    """Which nodes the pods go to, and how near to each other."""

    required: dict[LabelKey, tuple[LabelValue, ...]]
    """Labels that a node must have, each with the values allowed: {label: [values]}."""
    preferred: tuple[PreferredNodes, ...]
    """Labels that a node should have: [{weight: 50, labels: {label: [values]}}]."""
    same_topology: LabelKey | None
    """Node label whose value the pods should share, such as topology.k8s.aws/network-node-layer-1;
    null does not care."""


class Probe(Section):
    """A command that says whether a worker pod is alive or ready."""

    command: Annotated[tuple[ShellText, ...], Field(min_length=1)]
    """Program and arguments that run in the container; exit status 0 is a success."""
    initial_delay_s: Whole = 0
    """Seconds from the container's start to the first probe."""
    period_s: Count = 10
    """Seconds from one probe to the next."""
    timeout_s: Count = 1
    """Seconds after which a probe that still runs has failed."""
    failure_threshold: Count = 3
    """Failures in a row until Kubernetes acts."""


class Probes(Section):
    """The pods' probes; null leaves one out."""

    startup: Probe | None
    """Holds the other probes back until it succeeds; a container that fails it is killed. null:
    none."""
    liveness: Probe | None
    """A container that fails it is killed. null: none."""
    readiness: Probe | None
    """A pod that fails it is not ready. null: none."""


_CAPABILITIES = "|".join(Path(__file__).with_name("capabilities.txt").read_text("ascii").split())
_DROPPED = f"ALL|{_CAPABILITIES}"
Capability = Annotated[str, AfterValidator(matching(_CAPABILITIES, _CAPABILITIES))]
DroppedCapability = Annotated[str, AfterValidator(matching(_DROPPED, _DROPPED))]


class SecurityContext(Section):
    """Rights of the pods. As they come, PodSecurity's level restricted admits them."""

    privileged: bool
    """Whether the workers' container has all rights on its node; true needs
    allow_privilege_escalation true and dropped_capabilities []."""
    run_as_user: Whole | None
    """User id of the pod's processes; null takes the image's, which has to be a number other than 0
    unless run_as_non_root is false."""
    run_as_group: Whole | None
    """Group id of the pod's processes; null takes the image's."""
    fs_group: Whole | None
    """Group id that mounted volumes belong to, and that may read the run's token; null changes no
    volume."""
    run_as_non_root: bool | None
    """Whether a node refuses to start the pods as root; null is true unless run_as_user is 0."""
    seccomp_profile: Literal["RuntimeDefault", "Unconfined"] | None
    """System calls that the pods may make: those of the container runtime's profile, or all; null
    is the node's default."""
    allow_privilege_escalation: bool
    """Whether a process may get more rights than its parent, as by sudo."""
    dropped_capabilities: tuple[DroppedCapability, ...]
    """Linux capabilities that no process has; [] leaves the container runtime's."""
    capabilities: tuple[Capability, ...] | None
    """Linux capabilities to add, with run_as_user 0; null is IPC_LOCK for pods with EFA devices
    whose run_as_user is 0, and none for others."""
    service_account_token: bool
    """Whether the pods get the token of their service account; no process of ours asks the API."""
    memory_limit_gib: Count | None
    """GiB of memory, /dev/shm with them, at which the workers' container is killed: at least what
    it asks for, at most instance.memory_gib; null sets no limit: workers that grow take their
    node's memory, and its kubelet ends pods, others too."""


class RestartPolicy(Section):
    """HyperPod: how many restarts within which period."""

    eval_period_s: Count
    """Seconds over which restarts are counted."""
    full_job_restarts_max: Whole | None
    """Restarts of the whole job until it has failed; null is the operator's default."""
    restarts_before_full_job: Whole | None
    """Restarts of processes within the period before the whole job is restarted; null is the
    operator's default."""
    repeat_offenders_to_avoid_max: Whole | None
    """How many nodes that fail repeatedly the operator keeps the job off; null is the operator's
    default."""
    scale_up_snooze_s: Whole | None
    """Seconds after a restart in which an elastic job is not scaled up; null is the operator's
    0."""


class LogRule(Section):
    """HyperPod: what a worker's log has to say, and how often."""

    name: DnsLabel
    """Name of the rule, which the operator gives as the reason when the rule strikes."""
    pattern: OneLine
    """Regular expression, matched from a line's beginning, with at most one group, which captures a
    number."""
    start_cutoff_s: Count | None = None
    """Seconds until the first match, after which the job counts as hanging; null has no limit."""
    recurring_s: Count | None = None
    """Seconds between two matches, after which the job counts as hanging; null has no limit."""
    metric_threshold: int | None = None
    """Whole number that `operator` compares the captured number with; null compares nothing."""
    operator: Literal["gt", "lt", "eq", "gteq", "lteq"] | None = None
    """Comparison of the captured number with `metric_threshold` that, where it is true, means that
    the job is slow; null compares nothing."""
    metric_points: Count | None = None
    """Matches in a row that have to be slow before the job counts as slow; null is the operator's
    1."""
    stop_pattern: OneLine | None = None
    """Regular expression for the line that switches the rule off; null leaves it on."""


class RunPolicy(Section):
    """How the cluster keeps, restarts and cleans up the job."""

    clean_pod_policy: Literal["All", "OnlyComplete", "None"] | None
    """HyperPod: which pods of a finished job to delete; null is All."""
    retries_max: Whole | None
    """HyperPod: starts of a run that has given up, until the job has failed; null takes
    process_restarts_max of checkpointless recovery, else trainer.max_restarts, else 6. Plain Job:
    failed pods until
    the job has failed, and one fault can fail a pod on every node; null is process_restarts_max of
    checkpointless recovery for each node, or Kubernetes' 6."""
    fault_deadline_s: Count | None
    """HyperPod: seconds that the job may stay in the status Fault; null sets no limit."""
    startup_deadline_s: Count | None
    """HyperPod: seconds that the job may take to start; null sets no limit."""
    ttl_s: Annotated[int, Field(ge=-1)] | None
    """Seconds until a finished job is deleted; -1 keeps it, and null leaves it to the cluster:
    HyperPod's default is 0, a plain Job is kept."""
    suspend: bool
    """Whether the job is created without pods and waits until someone resumes it."""
    workload_mode: OneLine | None
    """HyperPod: the operator's field workloadMode; null leaves it out."""
    restart_policy: RestartPolicy | None
    """HyperPod: limits of restarts; null takes those of checkpointless recovery, if it is on."""
    log_monitoring: tuple[LogRule, ...]
    """HyperPod: rules about the standard output of each node's first worker, by which a hanging or
    slow job is found."""


class K8sCluster(_Encrypted):
    """A Kubernetes cluster, or HyperPod on EKS."""

    kind: Literal["k8s"]
    """k8s: the job runs on a Kubernetes cluster."""
    job_kind: Literal["hyperpod", "job", "trainjob"]
    """hyperpod renders a HyperPodPyTorchJob for HyperPod's training operator; job renders an
    Indexed Job for any cluster; trainjob renders a TrainJob for Kubeflow's Trainer."""
    namespace: DnsLabel
    """Namespace of everything in the manifest."""
    image: Image
    """Container image of the pods, as the cluster pulls it; it contains this project, the trainer's
    libraries and, for EFA, aws-ofi-nccl."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    """When a node pulls the image."""
    image_pull_secrets: tuple[DnsSubdomain, ...]
    """Names of the Secrets with which the image is pulled."""
    service_account: DnsSubdomain | None
    """Service account of the pods; null is the namespace's default."""
    priority_class: DnsSubdomain | None
    """Kubernetes' PriorityClass of the pods; null is the cluster's default."""
    growth_priority_class: DnsSubdomain | None
    """PriorityClass of an elastic run's further nodes, each a Job of its own; null is
    priority_class."""
    queue: DnsSubdomain | None
    """Kueue's LocalQueue that the job waits in; null is no queue."""
    queue_priority: DnsSubdomain | None
    """Kueue's WorkloadPriorityClass of the job; null is none."""
    labels: dict[LabelKey, LabelValue]
    """Further labels of everything in the manifest, the pods included."""
    annotations: dict[LabelKey, str]
    """Further annotations of everything in the manifest, the pods included."""
    node_selector: dict[LabelKey, LabelValue]
    """Labels that a node must have: {label: value}; node.kubernetes.io/instance-type is added for
    types that begin with ml."""
    affinity: Affinity
    """Which nodes the pods go to, and how near to each other."""
    tolerations: tuple[Toleration, ...]
    """Taints that the pods tolerate: [{key: nvidia.com/gpu, operator: Exists, effect:
    NoSchedule}]."""
    host_network: bool
    """Whether the pods use their nodes' network instead of one of their own."""
    network_policy: bool
    """Whether a NetworkPolicy lets the job's pods alone connect to each other; it does nothing with
    host_network, and in a cluster whose network holds no policies."""
    network_policy_from: tuple[NetworkPeer, ...]
    """Further peers that may connect to the pods: [{namespace_labels: {name: monitoring}}] or
    [{cidr: 10.0.0.0/8}]."""
    termination_grace_s: Count
    """Seconds from SIGTERM to SIGKILL of a pod; time to bring checkpoints to a store comes on
    top."""
    secrets: dict[EnvName, SecretKey]
    """Secret variables of the workers, each one key of a Secret: {NAME: {name: secret, key:
    key}}."""
    secrets_from: tuple[DnsSubdomain, ...]
    """Names of Secrets whose keys all become variables of the workers."""
    volume_claims: tuple[PersistentVolumeClaim, ...]
    """Persistent volume claims to mount: [{claim_name: fsx, mount_path: /data}]."""
    host_paths: tuple[HostPath, ...]
    """Folders and files of the node to mount: [{path: /opt/dlami/nvme, mount_path: /scratch, type:
    Directory}]."""
    run_path: AbsolutePath
    """Folder in the container in which each job has one of its name, with its events and
    checkpoints; mount a claim there that every pod can write."""
    python: OneLine | None
    """Command that starts Python; null is python."""
    pre_script: ShellText | None
    """Shell lines that run in each pod before its workers, and before its checkpoint daemon, if
    there is one; null runs none."""
    probes: Probes
    """Commands that tell Kubernetes whether a pod has started, lives and is ready."""
    security: SecurityContext
    """User, group and rights of the pods' processes."""
    run_policy: RunPolicy
    """How the cluster keeps, restarts and deletes the job."""
    num_spares: Whole
    """HyperPod: further pods that wait without a rank."""
    operator_from: tuple[Cidr, ...]
    """HyperPod: networks from which the agents take the operator's commands; [] is the private
    ones, in which clusters have their pods: 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16,
    100.64.0.0/10 and fc00::/7."""
    rdzv_port: Port | None
    """Port at which the agent of each pod of a plain Job is found by the others; null is 29500.
    HyperPod's operator names the port."""

    @property
    def has_indexed_pods(self) -> bool:
        """Return whether the pods are an Indexed Job's, whose names follow from their index."""
        return self.job_kind != "hyperpod"

    def mount_paths(self, *, is_writable: bool = False) -> list[str]:
        """Return where volumes are mounted, or those alone that pods may write to."""
        mounts: list[PersistentVolumeClaim | HostPath] = [*self.volume_claims, *self.host_paths]
        return [each.mount_path for each in mounts if not (is_writable and each.read_only)]

    def mount_of(self, path: str) -> PersistentVolumeClaim | HostPath | None:
        """Return the innermost volume that holds a path of a pod, None where none does."""
        mounts: list[PersistentVolumeClaim | HostPath] = [*self.volume_claims, *self.host_paths]
        found = (each for each in mounts if PurePosixPath(path).is_relative_to(each.mount_path))
        return max(found, key=lambda each: len(each.mount_path), default=None)


Cluster = Annotated[LocalCluster | SlurmCluster | K8sCluster, Field(discriminator="kind")]
