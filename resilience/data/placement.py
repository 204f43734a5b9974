"""Which batches a rank gets, and with whom on its node it shares a cache. Pure.

Every rank computes the same from the layout alone, so nobody has to ask, and no collective and
no process group is needed. The ranks of one data-parallel position get the same batches; those
of them on one node read one cache, and whoever of them comes first starts its producer.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

_AXES = ("tp", "cp", "dp", "pp")
_FOLDED = "ep"
"""Megatron names it in its order; it divides the data-parallel axis and is none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parallel degrees of a job and the nodes it runs on."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    num_nodes: int = 1
    gpus_per_node: int = 1
    order: str = "tp-cp-dp-pp"
    """The axes from the one that changes with each rank to the one that changes last."""

    def __post_init__(self) -> None:
        names = ("tp", "pp", "cp", "dp", "num_nodes", "gpus_per_node")
        if wrong := [f"{each}={getattr(self, each)}" for each in names if getattr(self, each) < 1]:
            raise ValueError(f"{', '.join(wrong)} is not allowed; want 1 or more")
        axes = [each for each in self.order.split("-") if each != _FOLDED]
        if sorted(axes) != sorted(_AXES) or self.order.split("-").count(_FOLDED) > 1:
            raise ValueError(
                f"order {self.order!r} is not allowed; want {', '.join(_AXES)} once each, "
                "the fastest first, such as 'tp-cp-dp-pp'"
            )
        num_ranks = self.tp * self.pp * self.cp * self.dp
        if num_ranks != self.num_nodes * self.gpus_per_node:
            raise ValueError(
                f"tp {self.tp} x pp {self.pp} x cp {self.cp} x dp {self.dp} = {num_ranks} ranks, "
                f"but {self.num_nodes} nodes x {self.gpus_per_node} GPUs = "
                f"{self.num_nodes * self.gpus_per_node}; set dp so that both are equal"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs and whose batches it gets."""

    rank: int
    node: int
    local_rank: int
    dp_rank: int
    """Its data-parallel position: ranks that are equal in it get the same batches."""
    is_producer_home: bool
    """It is the first rank of its position on its node."""


def place(layout: Layout) -> tuple[RankPlace, ...]:
    """Return the place of each rank; nodes are filled one after the other, as torchrun does."""
    places = []
    seen: set[tuple[int, int]] = set()
    for rank in range(layout.num_nodes * layout.gpus_per_node):
        node, local_rank = divmod(rank, layout.gpus_per_node)
        dp_rank = _dp_rank(layout, rank)
        places.append(
            RankPlace(
                rank=rank,
                node=node,
                local_rank=local_rank,
                dp_rank=dp_rank,
                is_producer_home=(node, dp_rank) not in seen,
            )
        )
        seen.add((node, dp_rank))
    return tuple(places)


def positions_of(layout: Layout, node: int) -> tuple[int, ...]:
    """Return the data-parallel positions on a node: it has one cache and producer for each."""
    return tuple(sorted({each.dp_rank for each in place(layout) if each.node == node}))


def peers_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the ranks that share a cache with a rank, itself among them, in order."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    places = place(layout)
    for each in places:
        groups[each.node, each.dp_rank].append(each.rank)
    return tuple(groups[places[rank].node, places[rank].dp_rank])


def _dp_rank(layout: Layout, rank: int) -> int:
    axes = [each for each in layout.order.split("-") if each != _FOLDED]
    faster = itertools.takewhile(lambda axis: axis != "dp", axes)
    stride = 1
    for axis in faster:
        stride *= getattr(layout, axis)
    return rank // stride % layout.dp
