"""Groups of workers that have a store and nothing else."""

from __future__ import annotations

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from training.environment import WorkerEnvironment
from training.group import WorkerGroup


def make_group(
    rank: int = 0, *, store: Store | None = None, node: str = "node-0", world_size: int = 2
) -> WorkerGroup:
    """Return a worker's view of a group; each node has one worker unless `node` says else."""
    environment = WorkerEnvironment(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        master_addr="nowhere",
        master_port=1,
        generation=0,
        is_store_hosted=True,
    )
    store = HashStore() if store is None else store
    return WorkerGroup(environment=environment, node=node, device=torch.device("cpu"), store=store)
