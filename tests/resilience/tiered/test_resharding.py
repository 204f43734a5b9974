"""Parts of saved shards become the tensors of any other number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience.tiered.resharding import Box, box_of, lack_all, order_shards, plan_parts
from resilience.tiered.shard import TensorPlace

Cut = tuple[tuple[int, int], ...]


def make_place(name: str, full: Sequence[int], cut: Cut) -> TensorPlace:
    shape = tuple(end - begin for begin, end in cut)
    return TensorPlace(
        name=name,
        dtype="float32",
        shape=shape,
        offset=0,
        num_bytes=4 * math.prod(shape),
        full_shape=tuple(full),
        begin=tuple(begin for begin, _ in cut),
    )


@st.composite
def cuttings(draw: st.DrawFn, full: Sequence[int]) -> list[Cut]:
    """Return a grid of boxes that makes up a tensor, some of them empty or there twice."""
    by_dim = []
    for size in full:
        inner = draw(st.lists(st.integers(0, size), max_size=3))
        bounds = [0, *sorted(inner), size]
        by_dim.append(list(itertools.pairwise(bounds)))
    boxes = list(itertools.product(*by_dim))
    again = draw(st.lists(st.sampled_from(boxes), max_size=2))
    return draw(st.permutations(boxes + again))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_value_comes_once_from_any_cutting_into_any_other(data: st.DataObject) -> None:
    full = data.draw(st.lists(st.integers(1, 6), max_size=3))
    saved = data.draw(cuttings(full))
    whole = np.arange(math.prod(full)).reshape(full)
    for cut in data.draw(cuttings(full)):
        target = make_place("a", full, cut)
        count = np.zeros(target.shape, dtype=int)
        values = np.full(target.shape, -1)
        lacking = lack_all([target])

        for each in saved:
            source = make_place("a", full, each)
            parts, lacking = plan_parts([source], lacking)
            for part in parts:
                there = whole[part.box.within((0,) * len(full))]
                count[part.box.within(target.begin)] += 1
                values[part.box.within(target.begin)] = there

        assert not lacking
        assert (count == 1).all()
        assert (values == whole[box_of(target).within((0,) * len(full))]).all()


def test_shard_without_a_tensor_leaves_it_lacking() -> None:
    wanted = lack_all([make_place("a", [4], ((0, 4),)), make_place("b", [2], ((0, 2),))])

    parts, lacking = plan_parts([make_place("a", [4], ((1, 3),))], wanted)

    assert [part.box for part in parts] == [Box((1,), (3,))]
    assert {each.target.name: each.boxes for each in lacking} == {
        "a": (Box((0,), (1,)), Box((3,), (4,))),
        "b": (Box((0,), (2,)),),
    }


def test_another_whole_shape_is_refused() -> None:
    wanted = lack_all([make_place("a", [4], ((0, 2),))])

    with pytest.raises(ValueError, match=r"has a as float32 \[5\], and this rank a as .* \[4\]"):
        plan_parts([make_place("a", [5], ((0, 2),))], wanted)


@pytest.mark.parametrize(
    ("own", "num_own", "offered", "order"),
    [
        pytest.param("2", 4, "0123", "2310", id="same-number"),
        pytest.param("0", 2, "0123", "0123", id="four-to-two-first"),
        pytest.param("1", 2, "0123", "2310", id="four-to-two-last"),
        pytest.param("3", 8, "0123", "1203", id="four-to-eight"),
        pytest.param("0", 1, "0123", "0123", id="four-to-one"),
        pytest.param("0", 1, ("rank-0", "rank-1"), ("rank-0", "rank-1"), id="names"),
    ],
)
def test_shards_of_the_same_place_are_tried_first(
    own: str, num_own: int, offered: Sequence[str], order: Sequence[str]
) -> None:
    assert order_shards(own, num_own, list(offered)) == list(order)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_each_shard_is_tried_once(num_own: int, num_saved: int, data: st.DataObject) -> None:
    own = data.draw(st.integers(0, num_own - 1))
    names = [str(number) for number in range(num_saved)]

    assert sorted(order_shards(str(own), num_own, names), key=int) == names
