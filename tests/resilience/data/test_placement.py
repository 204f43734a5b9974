"""Which rank gets which batches, and with whom on its node: for layouts of up to 64 ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.data.placement import Layout, peers_of, place, positions_of

AXES = ("tp", "cp", "dp", "pp")
ORDERS = ["-".join(order) for order in itertools.permutations(AXES)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any degrees whose product is at most 64, on nodes of any size that divides it."""
    left, degrees = 64, {}
    for axis in draw(st.permutations(AXES)):
        degrees[axis] = draw(st.integers(1, left))
        left //= degrees[axis]
    num_ranks = math.prod(degrees.values())
    gpus = draw(st.sampled_from([each for each in range(1, 65) if num_ranks % each == 0]))
    order = draw(st.sampled_from([*ORDERS, "tp-cp-ep-dp-pp"]))
    return Layout(**degrees, num_nodes=num_ranks // gpus, gpus_per_node=gpus, order=order)


def expected_positions(layout: Layout) -> list[int]:
    """The data-parallel coordinate of each rank in an array with one dim for each axis."""
    slowest_first = [each for each in reversed(layout.order.split("-")) if each != "ep"]
    grid = np.indices([getattr(layout, axis) for axis in slowest_first])
    return grid[slowest_first.index("dp")].reshape(-1).tolist()


@given(layout=layouts())
def test_each_rank_has_one_position(layout: Layout) -> None:
    places = place(layout)

    assert [each.dp_rank for each in places] == expected_positions(layout)
    assert [(each.node, each.local_rank) for each in places] == list(
        itertools.product(range(layout.num_nodes), range(layout.gpus_per_node))
    )
    assert {each.dp_rank for each in places} == set(range(layout.dp))


@given(layout=layouts())
def test_ranks_of_a_position_on_a_node_share_one_cache(layout: Layout) -> None:
    places = place(layout)

    groups = {peers_of(layout, each.rank) for each in places}

    assert sorted(itertools.chain(*groups)) == [each.rank for each in places]
    for group in groups:
        members = [places[rank] for rank in group]
        assert len({(each.node, each.dp_rank) for each in members}) == 1
        assert [each.is_producer_home for each in members] == [True] + [False] * (len(group) - 1)
    assert len(groups) == sum(len(positions_of(layout, node)) for node in range(layout.num_nodes))


@given(layout=layouts())
def test_a_node_fills_the_positions_of_its_ranks(layout: Layout) -> None:
    for node in range(layout.num_nodes):
        ranks = [each.dp_rank for each in place(layout) if each.node == node]

        assert positions_of(layout, node) == tuple(sorted(set(ranks)))


@pytest.mark.parametrize(
    ("layout", "positions", "groups"),
    [
        pytest.param(
            Layout(tp=4, dp=4, num_nodes=2, gpus_per_node=8),
            [(0, 1), (2, 3)],
            [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)],
            id="two-positions-a-node",
        ),
        pytest.param(
            Layout(tp=8, pp=2, num_nodes=2, gpus_per_node=8),
            [(0,), (0,)],
            [tuple(range(8)), tuple(range(8, 16))],
            id="one-position-on-two-nodes",
        ),
        pytest.param(
            Layout(tp=2, pp=2, dp=2, gpus_per_node=8),
            [(0, 1)],
            [(0, 1, 4, 5), (2, 3, 6, 7)],
            id="stages-share-too",
        ),
        pytest.param(
            Layout(tp=2, cp=2, dp=2, gpus_per_node=8, order="dp-tp-cp-pp"),
            [(0, 1)],
            [(0, 2, 4, 6), (1, 3, 5, 7)],
            id="data-parallel-fastest",
        ),
    ],
)
def test_groups_of_known_layouts(
    layout: Layout, positions: list[tuple[int, ...]], groups: list[tuple[int, ...]]
) -> None:
    ranks = range(layout.num_nodes * layout.gpus_per_node)

    assert [positions_of(layout, node) for node in range(layout.num_nodes)] == positions
    assert sorted({peers_of(layout, rank) for rank in ranks}) == groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tp": 2, "dp": 3, "gpus_per_node": 8},
            "tp 2 x pp 1 x cp 1 x dp 3 = 6 ranks, but 1 nodes x 8 GPUs = 8; set dp so that",
        ),
        ({"tp": 0, "dp": -1}, "tp=0, dp=-1 is not allowed; want 1 or more"),
        ({"order": "tp-dp-pp"}, "order 'tp-dp-pp' is not allowed; want tp, cp, dp, pp once each"),
        ({"order": "tp-cp-dp-pp-dp"}, "order 'tp-cp-dp-pp-dp' is not allowed"),
        ({"order": "tp-ep-ep-cp-dp-pp"}, "order 'tp-ep-ep-cp-dp-pp' is not allowed"),
        ({"order": ""}, "order '' is not allowed"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**options)
