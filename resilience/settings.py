"""Options of every resilience feature, as a recipe writes them.

The launcher builds its Job from these, so nothing here may import torch or
any module of a feature. A feature that is null is off.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CheckpointlessSettings(_Settings):
    """Recovery from replicas in memory, without a checkpoint."""

    transfer_buffer_mib: Count
    """Shared memory that each worker maps beforehand to receive or hand over state."""
    process_restarts_max: Count
    """Worker replacements before the whole job is started again."""
    restart_window_s: Count
    """Length of the period over which replacements are counted."""

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


class ResilienceSettings(_Settings):
    """The features that a run has."""

    checkpointless: CheckpointlessSettings | None
    elastic: ElasticSettings | None

    def names(self) -> tuple[str, ...]:
        """Return the features that are on, in the order of their fields."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)

    def shm_mib(self, num_workers: int) -> int:
        """Return the shared memory in MiB that the features need on one node."""
        return self.checkpointless.shm_mib(num_workers) if self.checkpointless else 0
