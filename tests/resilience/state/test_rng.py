"""Random numbers follow from the seed, the step and the number of the micro batch alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from resilience.state.rng import seed_micro_batch

PLACES = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 12, 3), (11, 2, 3), (1, 1, 23)]
"""Seed, step and number; some have the same digits in a row."""


@pytest.fixture(autouse=True)
def own_numbers() -> Iterator[None]:
    """Leave the generators of this process as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(1).item()


def test_the_same_micro_batch_draws_the_same_whatever_was_drawn_before() -> None:
    seed_micro_batch(1, 2, 3)
    first = draw()
    draw()

    seed_micro_batch(1, 2, 3)

    assert draw() == first


def test_torch_draws_as_if_all_of_it_had_been_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are seeded where they are in use, and else cost nothing."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_micro_batch(1, 2, 3)
    drawn = torch.rand(8)
    assert seeds == []

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seed_micro_batch(1, 2, 3)
    (seed,) = seeds

    torch.default_generator.manual_seed(0)
    monkeypatch.undo()
    torch.manual_seed(seed)
    assert torch.rand(8).tolist() == drawn.tolist()


@pytest.mark.parametrize("source", range(3), ids=["python", "numpy", "torch"])
def test_another_seed_step_or_micro_batch_draws_other_numbers(source: int) -> None:
    drawn = set()
    for place in PLACES:
        seed_micro_batch(*place)
        drawn.add(draw()[source])

    assert len(drawn) == len(PLACES)
