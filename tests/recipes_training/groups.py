"""Groups of workers that have a store and nothing else."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from recipes_training.group import WorkerGroup
from resilience.comm.world import World
from resilience.state.layout import Layout, make_layout
from tests.resilience.stores import open_store

LONG = timedelta(seconds=60)


def open_world(book: Store, generation: int, *, rank: int, size: int) -> World:
    """Return a world of ranks whose stores are served to those that have this book."""
    world = World(device_type="cpu")
    store = open_store(book, generation)
    world.open(store=store, rank=rank, world_size=size, timeout=LONG)
    return world


class Quiet:
    """A watch that hears nothing."""

    places = ()

    def requests(self) -> int:
        return 0

    def forward(self, micro_batch: int, *, is_last: bool) -> None: ...
    def backward(self, micro_batch: int) -> None: ...
    def reach(self, place: str) -> None: ...


def make_group(
    rank: int = 0,
    *,
    store: Store | None = None,
    node: str | None = None,
    layout: Layout | None = None,
    generation: int = 0,
    world_size: int = 2,
    num_local_ranks: int = 1,
    num_shards: int = 1,
) -> WorkerGroup:
    """Return a worker's view of a group; its node has the layout's name unless `node` says else."""
    layout = layout or make_layout(
        nodes=[f"node-{number}" for number in range(world_size // num_local_ranks)],
        num_local_ranks=num_local_ranks,
        num_shards=num_shards,
    )
    return WorkerGroup(
        rank=rank,
        layout=layout,
        generation=generation,
        node=node or "node-0",
        device=torch.device("cpu"),
        store=HashStore() if store is None else store,
    )
