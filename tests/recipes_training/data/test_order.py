from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes_training.data.order import SampleOrder, Split
from resilience.data.order import make_permutation

SEEDS = st.integers(0, 2**63)


@given(size=st.integers(1, 600), seed=SEEDS, epoch=st.integers(0, 10))
def test_permutation_is_a_bijection(size, seed, epoch):
    permutation = make_permutation(size=size, seed=seed, epoch=epoch)

    assert sorted(permutation(index) for index in range(size)) == list(range(size))


@given(size=st.integers(10**9, 10**13), seed=SEEDS, start=st.integers(0, 10**9 - 300))
def test_permutation_of_many_samples_has_no_repetition(size, seed, start):
    permutation = make_permutation(size=size, seed=seed, epoch=0)

    images = [permutation(index) for index in range(start, start + 200)]

    assert len(set(images)) == 200
    assert all(0 <= image < size for image in images)


def test_permutation_spreads_neighbours():
    permutation = make_permutation(size=100_000, seed=1, epoch=0)

    images = [permutation(index) for index in range(1000)]

    assert 45_000 < sum(images) / 1000 < 55_000
    assert sum(abs(a - b) < 100 for a, b in itertools.pairwise(images)) < 20


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_is_refused(index):
    with pytest.raises(IndexError, match=f"index {index} is outside 0 to 9"):
        make_permutation(size=10, seed=0, epoch=0)(index)


@given(num_samples=st.integers(1, 200), seed=SEEDS, epoch=st.integers(0, 4))
def test_each_epoch_has_every_sample_once(num_samples, seed, epoch):
    order = SampleOrder(num_samples=num_samples, seed=seed)

    numbers = [order.sample_at(epoch * num_samples + index) for index in range(num_samples)]

    assert sorted(numbers) == list(range(num_samples))


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(make_permutation(size=50, seed=seed, epoch=epoch)(i) for i in range(50))

    assert len({order(seed, epoch) for seed in range(5) for epoch in range(5)}) == 25


def test_order_stays_what_it_was():
    """A change of the order would make runs of older versions continue elsewhere."""
    order = SampleOrder(num_samples=1000, seed=1234)

    assert [order.sample_at(position) for position in (0, 1, 2, 999, 1000)] == [
        194,
        243,
        556,
        307,
        468,
    ]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    micro_batch_size, world_size = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    num_micro_batches = draw(st.integers(world_size, 4 * world_size))
    return micro_batch_size, world_size, micro_batch_size * num_micro_batches


@given(layout=layouts(), step=st.integers(0, 10**6))
def test_split_covers_each_position_of_a_step_once(layout, step):
    micro_batch_size, world_size, global_batch_size = layout
    split = Split(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
    )

    shares = [split.micro_batches(rank) for rank in range(world_size)]
    parts = [split.positions(step=step, micro_batch=number) for share in shares for number in share]

    positions = [position for part in parts for position in part]
    assert positions == list(range(step * global_batch_size, (step + 1) * global_batch_size))
    assert {len(part) for part in parts} == {micro_batch_size}
    sizes = sorted(map(len, shares))
    assert sizes[0] >= 1
    assert sizes[-1] - sizes[0] <= 1
