"""Who holds what in one generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.state.layout import Layout, make_layout


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    nodes = draw(st.lists(st.text(), min_size=1, max_size=6, unique=True))
    num_local_ranks = draw(st.integers(1, 9))
    world_size = len(nodes) * num_local_ranks
    divisors = [each for each in range(1, world_size + 1) if world_size % each == 0]
    num_shards = draw(st.sampled_from(divisors))
    stages = [each for each in divisors if num_shards % each == 0]
    return make_layout(
        nodes=nodes,
        num_local_ranks=num_local_ranks,
        num_shards=num_shards,
        is_sharded=draw(st.none() | st.booleans()),
        num_stages=draw(st.sampled_from(stages)),
    )


@given(layouts())
def test_each_rank_has_one_seat(layout: Layout) -> None:
    seats = [layout.seat(rank) for rank in range(layout.world_size)]

    assert len({(each.node, each.local_rank) for each in seats}) == layout.world_size
    assert [each.local_rank for each in seats] == layout.local_ranks
    for rank, seat in enumerate(seats):
        assert layout.nodes[seat.node_index] == seat.node
        assert layout.index_of(seat.node) == seat.node_index
        assert layout.ranks_of(seat.node_index)[seat.local_rank] == rank


@given(layouts())
def test_each_copy_has_each_shard_once(layout: Layout) -> None:
    seats = [layout.seat(rank) for rank in range(layout.world_size)]

    copies = [
        [each.shard for each in seats if each.replica == replica]
        for replica in range(layout.num_replicas)
    ]
    assert sum(map(len, copies)) == layout.world_size
    assert {len(copy) for copy in copies} == {layout.num_shards}
    assert all(tuple(copy) == layout.shards for copy in copies)
    if layout.is_sharded:
        assert layout.shards == tuple(map(str, range(layout.num_shards)))
    else:
        assert {each.shard for each in seats} == {""}


@given(layouts(), st.integers(0, 5))
def test_ranks_stay_who_they_are_when_a_node_takes_the_place_of_another(
    layout: Layout, place: int
) -> None:
    """Replica and shard belong to a place, whoever has it."""
    place %= len(layout.nodes)
    nodes = [*layout.nodes[:place], "".join(layout.nodes) + "x", *layout.nodes[place + 1 :]]
    after = make_layout(
        nodes=nodes,
        num_local_ranks=layout.num_local_ranks,
        num_shards=layout.num_shards,
        is_sharded=layout.is_sharded,
        num_stages=layout.num_stages,
    )

    for rank in range(layout.world_size):
        before, now = layout.seat(rank), after.seat(rank)
        assert (before.replica, before.shard) == (now.replica, now.shard)
        assert (before.node == now.node) == (rank not in layout.ranks_of(place))


def test_place_belongs_to_the_start_of_an_agent_that_got_it() -> None:
    plain = make_layout(nodes=["a", "b"], num_local_ranks=1)
    layout = replace(plain, starts=("a#1", "b#1"))

    assert [layout.place_of("b", start) for start in ("b#1", "b#2")] == [1, -1]
    assert layout.place_of("c", "b#1") == -1
    assert plain.place_of("b", "b#2") == 1


def test_a_stage_has_ranks_in_a_row_and_a_copy_has_ranks_in_each() -> None:
    """Megatron's order: two stages of two instances, each of two ranks in a stage."""
    layout = make_layout(nodes=["a", "b"], num_local_ranks=4, num_shards=4, num_stages=2)

    seats = [layout.seat(rank) for rank in range(8)]

    assert [each.replica for each in seats] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [each.shard for each in seats] == ["0", "1", "0", "1", "2", "3", "2", "3"]


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_that_there_is_not_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} is none of 4"):
        make_layout(nodes=["a", "b"], num_local_ranks=2).seat(rank)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"num_shards": 3}, "world size 4 does not divide by 3", id="shards"),
        pytest.param(
            {"num_shards": 2, "num_stages": 4}, "2 shards do not divide by 4", id="stages"
        ),
        pytest.param({"num_shards": 0}, "2 ranks of a node and 0 shards", id="no-shard"),
        pytest.param({"num_local_ranks": 0}, "0 ranks of a node and 1 shards", id="no-rank"),
        pytest.param({"nodes": []}, "nodes are none", id="no-node"),
        pytest.param({"nodes": ["a", "a"]}, "nodes are a, a; want different ones", id="twice"),
    ],
)
def test_layout_that_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_layout(**{"nodes": ["a", "b"], "num_local_ranks": 2, **values})
