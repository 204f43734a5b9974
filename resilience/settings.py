"""Options of every resilience feature, as a recipe writes them.

The launcher builds its Job from these, so nothing here may import torch or
any module of a feature. A feature that is null is off.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Counts are kept in 32 bits by what reads them.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

FaultKind = Literal["exception", "sigkill", "sigstop", "exit", "corrupt", "slow"]
FaultPlace = Literal[
    "forward",
    "backward",
    "reduction",
    "gate",
    "before_update",
    "within_update",
    "after_update",
    "data",
    "recovery",
]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointlessSettings(_Settings):
    """Recovery from replicas in memory, without a checkpoint."""

    transfer_buffer_mib: Count
    """Shared memory that each worker maps beforehand to receive or hand over state."""
    spares_per_node: Whole
    """Warm processes on each node that wait to take a dead worker's place."""
    standby_nodes: Whole
    """Nodes beyond trainer.num_nodes that wait to take a lost node's place."""
    hang_deadline_s: Seconds
    """No progress on any rank for this long is a hang."""
    stop_deadline_s: Seconds
    """How long a worker may take to stop after it was told to; then it is killed."""
    join_deadline_s: Seconds
    """How long ranks may take to form their process group, and a lost node to be replaced."""
    process_restarts_max: Count
    """Worker replacements before the whole job is started again."""
    restart_window_s: Count
    """Length of the period over which replacements are counted."""
    restarts_without_progress_max: Count
    """Generations in a row that end before a new step is done; after these the run gives up."""
    self_check_every_n_steps: Count | None
    """Compare the state with the digest of its last update every n steps; null never does."""

    def shm_mib(self, num_workers: int) -> int:
        """Return the shared memory in MiB that a node of `num_workers` needs."""
        return self.transfer_buffer_mib * num_workers


class ElasticSettings(_Settings):
    """A job that goes on with fewer nodes, and grows again."""

    nodes_min: Count
    nodes_max: Count
    nodes_step: Count | None
    """Grow and shrink by this many nodes; excludes `nodes_allowed`."""
    nodes_allowed: tuple[Count, ...] | None
    """The only sizes allowed; excludes `nodes_step`."""
    scaling_timeout_s: Count
    graceful_shutdown_timeout_s: Count
    faulty_scale_down_timeout_s: Count | None


class InjectedFault(_Settings):
    """One fault that the run brings upon itself, on one rank or on a whole node."""

    kind: FaultKind
    place: FaultPlace
    """Where in the step, or in the recovery before it, the fault comes."""
    step: Whole
    """Index of the step, from 0; for `recovery` that with which training goes on, or an earlier."""
    rank: Whole | None = None
    node: Whole | None = None
    """Index of the node whose first worker is meant, with sigkill all of them; excludes `rank`."""
    tensor: Literal["parameter", "moment"] | None = None
    """What `corrupt` changes; null for the other kinds."""
    seconds: Seconds | None = None
    """How long `slow` waits; null for the other kinds."""


class RandomFaults(_Settings):
    """Faults drawn from a seed, so that a run with them can be repeated."""

    seed: Whole
    mean_steps_between: Count
    """Mean number of steps from one fault to the next."""
    kinds: Annotated[tuple[FaultKind, ...], Field(min_length=1)]
    places: Annotated[tuple[FaultPlace, ...], Field(min_length=1)]


class FaultsSettings(_Settings):
    """Faults that a run brings upon itself, to show that it recovers."""

    injected: tuple[InjectedFault, ...]
    random: RandomFaults | None


class ResilienceSettings(_Settings):
    """The features that a run has."""

    checkpointless: CheckpointlessSettings | None
    elastic: ElasticSettings | None
    faults: FaultsSettings | None

    @property
    def standby_nodes(self) -> int:
        """Return the number of nodes beyond the job's own that wait to take over."""
        return self.checkpointless.standby_nodes if self.checkpointless else 0

    @property
    def spares_per_node(self) -> int:
        """Return the number of warm processes that wait on each node."""
        return self.checkpointless.spares_per_node if self.checkpointless else 0

    def names(self) -> tuple[str, ...]:
        """Return the features that are on, in the order of their fields."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)

    def shm_mib(self, num_workers: int) -> int:
        """Return the shared memory in MiB that the features need on one node."""
        return self.checkpointless.shm_mib(num_workers) if self.checkpointless else 0
