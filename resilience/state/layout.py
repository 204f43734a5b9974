"""Who holds what in one generation: which node and which part of the state each rank has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict, StrictBool, StrictInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What one rank holds."""

    replica: int
    """Which copy of the state it holds a part of."""
    shard: str
    """Which part of the copy; ranks with equal ones can take each other's place."""
    node: str
    """Name of the node."""
    node_index: int
    """Position of the node among the layout's nodes."""
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks of one generation: those of the first node, then those of the next."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    nodes: tuple[str, ...]
    """Names of the nodes in the order of their ranks."""
    num_local_ranks: StrictInt
    """Ranks of each node."""
    num_shards: StrictInt
    """Ranks that together hold one copy of the state."""
    is_sharded: StrictBool
    """Whether shards have names, as they also have where one rank holds all that there are."""
    num_stages: StrictInt = 1
    """Pipeline stages: each is so many ranks in a row, and a copy has ranks in all of them."""
    starts: tuple[str, ...] = ()
    """Which start of its agent each node's is; empty where nobody needs to know."""

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"nodes are {', '.join(self.nodes) or 'none'}; want different ones")
        if self.num_local_ranks < 1 or self.num_shards < 1:
            raise ValueError(
                f"{self.num_local_ranks} ranks of a node and {self.num_shards} shards; want at "
                "least 1 of each"
            )
        if self.num_stages < 1 or self.num_shards % self.num_stages:
            raise ValueError(
                f"{self.num_shards} shards do not divide by {self.num_stages} pipeline stages"
            )
        if self.world_size % self.num_shards:
            raise ValueError(
                f"world size {self.world_size} does not divide by {self.num_shards}, the ranks "
                "that together hold one copy of the state"
            )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.nodes) * self.num_local_ranks

    @property
    def num_replicas(self) -> int:
        """Return the number of copies of the state."""
        return self.world_size // self.num_shards

    @property
    def shards(self) -> tuple[str, ...]:
        """Return the names of the shards that together are one copy of the state."""
        return tuple(map(self._name_shard, range(self.num_shards)))

    @property
    def local_ranks(self) -> Sequence[int]:
        """Return the local rank of each rank."""
        return [rank % self.num_local_ranks for rank in range(self.world_size)]

    def seat(self, rank: int) -> Seat:
        """Return what a rank holds; raises IndexError for one that there is not."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is none of {self.world_size}")
        node_index, local_rank = divmod(rank, self.num_local_ranks)
        stage, place = divmod(rank, self.world_size // self.num_stages)
        stage_shards = self.num_shards // self.num_stages
        replica, shard = divmod(place, stage_shards)
        return Seat(
            replica=replica,
            shard=self._name_shard(stage * stage_shards + shard),
            node=self.nodes[node_index],
            node_index=node_index,
            local_rank=local_rank,
        )

    def _name_shard(self, number: int) -> str:
        return str(number) if self.is_sharded else ""

    def shards_of(self, node_index: int) -> tuple[str, ...]:
        """Return which part of the state each rank of the node at a position has."""
        return tuple(self.seat(rank).shard for rank in self.ranks_of(node_index))

    def ranks_of(self, node_index: int) -> range:
        """Return the ranks of the node at a position."""
        return range(node_index * self.num_local_ranks, (node_index + 1) * self.num_local_ranks)

    def index_of(self, node: str) -> int:
        """Return the position of a node, -1 for one that has no ranks."""
        return self.nodes.index(node) if node in self.nodes else -1

    def place_of(self, node: str, start: str) -> int:
        """Return the position of a node, -1 where it is another start of its agent that has it."""
        place = self.index_of(node)
        return -1 if place >= 0 and self.starts and self.starts[place] != start else place


def make_layout(
    *,
    nodes: Sequence[str],
    num_local_ranks: int,
    num_shards: int = 1,
    is_sharded: bool | None = None,
    num_stages: int = 1,
) -> Layout:
    """Return the layout of such ranks; raises ValueError where the world does not divide.

    `is_sharded` is whether shards have names; without it they have where there are several.
    """
    return Layout(
        nodes=tuple(nodes),
        num_local_ranks=num_local_ranks,
        num_shards=num_shards,
        is_sharded=num_shards > 1 if is_sharded is None else is_sharded,
        num_stages=num_stages,
    )
