"""Groups of workers that have a store and nothing else."""

from __future__ import annotations

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from resilience.state.layout import make_layout
from training.group import WorkerGroup


def make_group(
    rank: int = 0,
    *,
    store: Store | None = None,
    node: str | None = None,
    world_size: int = 2,
    num_local_ranks: int = 1,
    num_shards: int = 1,
) -> WorkerGroup:
    """Return a worker's view of a group; its node has the layout's name unless `node` says else."""
    layout = make_layout(
        nodes=[f"node-{number}" for number in range(world_size // num_local_ranks)],
        num_local_ranks=num_local_ranks,
        num_shards=num_shards,
    )
    return WorkerGroup(
        rank=rank,
        layout=layout,
        generation=0,
        node=node or "node-0",
        device=torch.device("cpu"),
        store=HashStore() if store is None else store,
    )
