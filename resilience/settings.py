"""Options of every resilience feature, as a recipe writes them.

The launcher builds its Job from these, so nothing here may import torch or
any module of a feature. A feature that is null is off.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

# Counts are kept in 32 bits by what reads them.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Patience = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Lease = Annotated[float, Field(ge=0.1, allow_inf_nan=False)]
DRAIN_S = 20.0
"""How long a daemon that is told to end sends to the store, where nothing else is said."""
CLOSE_TIMEOUT_S = 30.0
"""How long its end may take once the store has what it is to get; then the process ends with
status 1."""

Port = Annotated[int, Field(ge=1024, le=65535)]


def _form(pattern: str, allowed: str) -> AfterValidator:
    """Return what accepts text of a form, and says in its error what is allowed."""
    form = re.compile(pattern)

    def check(value: str) -> str:
        if not form.fullmatch(value):
            raise ValueError(f"allowed: {allowed}")
        return value

    return AfterValidator(check)


# Spelled here too, as nothing of a feature may be imported: resilience/tiered/paths.py.
Namespace = Annotated[
    str,
    _form(
        r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}",
        "1 to 200 letters, digits, '.', '_' or '-', the first of them no '.'",
    ),
]
StoreUrl = Annotated[
    str,
    _form(
        r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[!-~]*)?|folder:/[ -~]+|folder:[A-Za-z0-9_-]+",
        "s3://BUCKET/PREFIX, folder:/PATH or folder:NAME, of plain characters; "
        "BUCKET: 3 to 63 of a to z, 0 to 9, '.' and '-'",
    ),
]
HttpUrl = Annotated[
    str, _form(r"https?://[A-Za-z0-9.\[\]:-]+/?", "http://HOST:PORT or https://HOST:PORT")
]
Region = Annotated[str, _form(r"[a-z0-9-]+", "a region's name such as us-east-1")]
AbsolutePath = Annotated[str, _form(r"/[ -~]+", "an absolute path of plain characters")]

FaultKind = Literal["exception", "sigkill", "sigstop", "exit", "corrupt", "slow"]
FaultPlace = Literal[
    "forward",
    "backward",
    "reduction",
    "gate",
    "before_update",
    "within_update",
    "after_update",
    "settle",
    "data",
    "recovery",
]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointlessSettings(_Settings):
    """Recovery from replicas in memory, without a checkpoint."""

    transfer_buffer_mib: Count
    """Shared memory in MiB that each worker maps beforehand to receive or hand over state."""
    spares_per_node: Whole
    """Warm processes on each node that wait to take a dead worker's place."""
    standby_nodes: Whole
    """Nodes beyond trainer.num_nodes that wait to take a lost node's place."""
    hang_deadline_s: Seconds
    """Seconds without progress on any rank that make a hang; the longest step has to fit."""
    stop_deadline_s: Seconds
    """Seconds that a worker may take to stop after it was told to; then it is killed."""
    join_deadline_s: Seconds
    """Seconds that ranks may take to form their process group, and a lost node to be replaced."""
    lease_s: Lease
    """Seconds without a word from a node that make it silent: its place may be given to another
    one, and it comes back as a standby. Shorter ones take a busy node for a lost one."""
    partition_patience_s: Seconds
    """Seconds that nodes which may not go on wait for the others before they save what they hold,
    and a shard for its last holder."""
    process_restarts_max: Count
    """Incidents within restart_window_s, for each node of the run, before the run gives up; one is
    all processes that a node loses between two committed steps."""
    restart_window_s: Count
    """Seconds over which incidents are counted."""
    restarts_forgiven_after_steps: Count
    """Committed steps after which an incident counts no more."""
    restarts_without_progress_max: Count
    """Generations in a row that one node, or errors that end no process, may end before a new step
    is done; after these the run gives up."""
    last_save_deadline_s: Seconds
    """Seconds that a run which gives up, or nodes that may not go on, may take to save their
    state."""
    self_check_every_n_steps: Count | None
    """Compare the state with the digest of its last update every n steps; null never does."""

    def shm_mib(self, num_workers: int) -> int:
        """Return the shared memory in MiB that a node of `num_workers` needs."""
        return self.transfer_buffer_mib * num_workers


_RESTART_GRACE_S = 600


class ElasticSettings(_Settings):
    """A job that goes on with fewer nodes, and grows again."""

    nodes_min: Count
    """Fewest nodes that the job starts or goes on with."""
    nodes_max: Count
    """Most nodes that the job grows to."""
    nodes_step: Count | None
    """Grow and shrink by this many nodes; excludes `nodes_allowed`. null: by 1."""
    nodes_allowed: Annotated[tuple[Count, ...], Field(min_length=1)] | None
    """The only numbers of nodes allowed; excludes `nodes_step`. null: all from nodes_min to
    nodes_max."""
    may_lose_steps: bool
    """Whether the run may go on with one copy of its state where no tier keeps another: should that
    be lost, too, it begins again."""
    hold_s: Patience
    """Seconds that a further node has to be there before the run grows by it."""
    scale_up_snooze_s: Patience
    """Seconds that the run keeps a size before it grows; twice as long each time the same node
    leaves again."""
    scaling_timeout_s: Count
    """HyperPod: seconds that the operator waits before it scales the job up."""
    graceful_shutdown_timeout_s: Count | None
    """Seconds that a node has to end in that is asked to, from the run or with it; null is what the
    cluster gives. HyperPod: seconds that the workers have before a change of size; null is 600."""
    faulty_scale_down_timeout_s: Whole | None
    """Seconds that a lost node is waited for before the run goes on without it; null is 0, and
    under HyperPod the operator's default."""

    @property
    def restart_grace_s(self) -> int:
        """Return the seconds that workers have to save and end before HyperPod's next start."""
        return self.graceful_shutdown_timeout_s or _RESTART_GRACE_S

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of nodes that the run may have, ascending."""
        if self.nodes_allowed:
            return tuple(sorted(self.nodes_allowed))
        return tuple(range(self.nodes_min, self.nodes_max + 1, self.nodes_step or 1))


class Fault(_Settings):
    """One fault that the run brings upon itself, on one rank or on a whole node."""

    kind: FaultKind
    """What happens: an exception, a signal to the process, its exit, changed bits of the state, or
    a wait."""
    place: FaultPlace
    """Where in the step, or in the recovery before it, the fault comes."""
    step: Whole
    """Index of the step, from 0; for `recovery` that with which training goes on, or an earlier
    one."""
    rank: Whole | None = None
    """Rank that the fault strikes; excludes `node`. null: `node` says where."""
    node: Whole | None = None
    """Index of the node whose first worker is struck, with sigkill all of its workers; excludes
    `rank`. null: `rank` says where."""
    tensor: Literal["parameter", "moment"] | None = None
    """What `corrupt` changes; null for the other kinds."""
    seconds: Seconds | None = None
    """Seconds that `slow` waits; null for the other kinds."""


FAULT_LIST = TypeAdapter(tuple[Fault, ...])
"""Writes and reads faults as JSON."""


class RandomFaults(_Settings):
    """Faults drawn from a seed, so that a run with them can be repeated."""

    seed: Whole
    """Seed from which the faults are drawn: the same seed gives the same faults."""
    mean_steps_between: Count
    """Mean number of steps from one fault to the next."""
    kinds: Annotated[tuple[FaultKind, ...], Field(min_length=1)]
    """Kinds of faults to draw from."""
    places: Annotated[tuple[FaultPlace, ...], Field(min_length=1)]
    """Places in a step to draw from."""


class FaultsSettings(_Settings):
    """Faults that a run brings upon itself, to show that it recovers."""

    injected: tuple[Fault, ...]
    """Faults at given steps: [{kind: exception, place: forward, step: 20, rank: 1}]."""
    random: RandomFaults | None
    """Faults drawn from a seed; null draws none."""


class RamTier(_Settings):
    """Checkpoints in the memory of nodes."""

    every_n_steps: Count | None
    """Take a checkpoint after every n steps; excludes `every_s`, and one of the two is null."""
    every_s: Seconds | None
    """Take a checkpoint when so many seconds have passed since the last; excludes `every_n_steps`,
    and one of the two is null."""
    keep: Count
    """Complete checkpoints that stay in memory."""
    replicas: Whole
    """Other nodes that get a copy of each shard."""
    domains_min: Count
    """Failure domains that must hold each shard of a complete step, if there are so many."""
    budget_mib: Count | None
    """Memory in MiB of all checkpoints on a node; null: what the model, `keep` and `replicas`
    need."""
    peers_hold: Literal["copies", "instead"]
    """`copies`: peers hold copies of what a node has itself; `instead`: only peers hold it, for
    states that fit once."""


class StoreTier(_Settings):
    """Checkpoints that outlive all nodes: S3, or a folder that all nodes share."""

    url: StoreUrl | None
    """s3://BUCKET/PREFIX, folder:/PATH that every node has, or folder:NAME in the run's own folder;
    null has to be replaced by the recipe or the user."""
    every_n_steps: Count | None
    """Store the checkpoints of steps that n divides; excludes `every_s`, and one of the two is
    null."""
    every_s: Seconds | None
    """Store a checkpoint when so many seconds have passed since the last; excludes `every_n_steps`,
    and one of the two is null."""
    keep: Count | None
    """Complete checkpoints that stay in the store; null keeps all."""
    required: bool
    """Whether a run whose store has not got all that it was to get ends with status 74, and keeps
    the rest in memory; false: it ends as it would have."""
    waiting_max: Count | None
    """Checkpoints that may wait in memory for a slow store before one is left out; null: no
    limit."""
    deadline_s: Seconds
    """Seconds that the store may take for one operation, beside the time for its bytes."""
    endpoint: HttpUrl | None
    """URL of a server of S3's protocol that is not AWS's; null is AWS."""
    region: Region | None
    """Region of the bucket; null: us-east-1."""
    path_style: bool
    """Whether the bucket is named in the URL's path instead of its host, as many servers other than
    AWS's need."""
    part_size_mib: Count | None
    """Size of an upload's parts in MiB; null: 16."""
    attempts: Count | None
    """How often a request is sent until it has failed; null: 5."""

    @property
    def is_in_run(self) -> bool:
        """Return whether the store is a folder in the run's own."""
        return self.url is not None and self.url.startswith("folder:") and "/" not in self.url


class TieredSettings(_Settings):
    """Checkpoints so cheap that they are taken every few steps, in tiers of growing safety."""

    backend: Literal["memoryd", "aws"]
    """`memoryd`: our daemon on each node; `aws`: AWS's library and the daemon of HyperPod."""
    namespace: Namespace | None
    """Name of the checkpoints in every tier; null: the run's own."""
    ram: RamTier
    """Checkpoints in the memory of nodes."""
    store: StoreTier | None
    """Checkpoints that outlive all nodes; null has none, and what no memory holds is lost."""
    copy_while: Literal["auto", "computing", "waiting"]
    """When a shard is copied: while the device computes the next step, or while training waits;
    `auto`: the first on an accelerator, the second on a CPU."""
    lease_s: Seconds
    """Seconds that a node's daemon outlives an agent that was killed, for the next one to find."""
    token_file: AbsolutePath | None
    """File, on every node, with the token that agents and clients of a daemon have to know; null:
    the run makes one."""
    peer_port: Port | None
    """Port on which each node's daemon listens for those of other nodes; null: a free one on this
    machine, one that follows from the job's id on Slurm, 9201 on Kubernetes."""
    http_port: Port | None
    """Port on loopback for AWS's client library, whose own is 9200; null opens none."""

    @property
    def starts_memoryd(self) -> bool:
        """Return whether each node of the run gets a daemon of its own."""
        return self.backend == "memoryd"


class CacheEncryption(_Settings):
    """The key of cached batches, which are then encrypted with AES-GCM."""

    kind: Literal["file", "kms"]
    """`file`: a key in a file, such as a mounted Secret; `kms`: one that AWS KMS wraps."""
    key_file: AbsolutePath | None
    """With kind file: file, on every node, that holds 32 bytes, as they are or in hexadecimal or
    base64; null with kind kms."""
    kms_key_id: Annotated[str, _form(r"[ -~]{1,2048}", "a key's id, ARN or alias")] | None
    """With kind kms: id, ARN or alias of the KMS key that wraps the cache's own; null with kind
    file."""
    endpoint: HttpUrl | None
    """URL of a server of KMS' protocol that is not AWS's; null is AWS."""
    region: Region | None
    """Region of the key; null: as AWS's own settings say."""


class MmapSettings(_Settings):
    """Batches in files that are mapped: made ahead, shared on a node, there after a restart."""

    folder: AbsolutePath | None
    """Folder on each node in which the run has one of its own, by its name; null: /dev/shm."""
    prefetch_length: Count
    """Training batches that are ready ahead of the slowest worker."""
    val_prefetch_length: Count
    """Validation batches that are ready ahead of the slowest worker; so many of the first ones stay
    for the next validation."""
    lookback_length: Whole
    """Training batches that stay behind the slowest worker, for steps that are taken again."""
    val_lookback_length: Whole
    """Validation batches that stay behind the slowest worker."""
    checkpoint_frequency: Count | None
    """Steps from one checkpoint to the next: the batches since the last one stay. null: as often as
    the tiers take them, if there are any."""
    budget_mib: Count
    """Memory in MiB of the batches of one data-parallel position on a node; never passed."""
    keep_s: Count
    """Seconds that the files stay when the run's last process on a node has ended."""
    deadline_s: Seconds
    """Seconds that a worker waits for a batch before it ends with an error."""
    encryption: CacheEncryption | None
    """Key with which the batches are encrypted; null leaves them readable to the run's user."""

    def shm_mib(self, num_positions: int) -> int:
        """Return the shared memory in MiB that the batches of so many positions may take."""
        is_shared = self.folder is None or f"{self.folder}/".startswith("/dev/shm/")
        return self.budget_mib * num_positions if is_shared else 0


class ResilienceSettings(_Settings):
    """The features that a run has."""

    checkpointless: CheckpointlessSettings | None
    """Recovery from replicas in memory, without a checkpoint; null is off."""
    elastic: ElasticSettings | None
    """A job that goes on with fewer nodes, and grows again; null is off."""
    faults: FaultsSettings | None
    """Faults that the run brings upon itself, to show that it recovers; needs checkpointless. null
    is off."""
    mmap: MmapSettings | None
    """Batches made ahead in mapped files, shared on a node and there after a restart; null is
    off."""
    tiered: TieredSettings | None
    """Checkpoints in memory every few steps, and in S3 or a folder now and then; null is off."""

    @property
    def standby_nodes(self) -> int:
        """Return the number of nodes beyond the job's own that wait to take over."""
        return self.checkpointless.standby_nodes if self.checkpointless else 0

    @property
    def spares_per_node(self) -> int:
        """Return the number of warm processes that wait on each node."""
        return self.checkpointless.spares_per_node if self.checkpointless else 0

    @property
    def batches(self) -> MmapSettings | None:
        """Return `mmap`; checkpoints are as frequent as the fastest tier's where it does not say.

        A tier that goes by seconds alone says nothing about steps.
        """
        if not self.mmap or not self.tiered or self.mmap.checkpoint_frequency is not None:
            return self.mmap
        store = self.tiered.store
        every_n_steps = self.tiered.ram.every_n_steps or (store and store.every_n_steps)
        return self.mmap.model_copy(update={"checkpoint_frequency": every_n_steps})

    def names(self) -> tuple[str, ...]:
        """Return the features that are on, in the order of their fields."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)

    def shm_mib(self, num_workers: int, num_positions: int) -> int:
        """Return the shared memory in MiB that the features need on one node.

        `num_positions` counts the data-parallel positions of its workers.
        """
        recovery_mib = self.checkpointless.shm_mib(num_workers) if self.checkpointless else 0
        return recovery_mib + (self.mmap.shm_mib(num_positions) if self.mmap else 0)
