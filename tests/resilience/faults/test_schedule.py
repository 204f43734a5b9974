from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resilience.faults.schedule import plan_faults, random_faults
from resilience.settings import FaultKind, FaultPlace, FaultsSettings

KINDS, PLACES = get_args(FaultKind), get_args(FaultPlace)
ALL = (KINDS, PLACES)
EXCEPTION = {"kind": "exception", "place": "forward", "step": 5, "rank": 1}
GOLDEN = [
    ("exit", "gate", 3, 3),
    ("sigkill", "settle", 7, 3),
    ("sigstop", "forward", 9, 0),
    ("exit", "gate", 11, 2),
    ("exit", "after_update", 15, 0),
    ("exception", "settle", 19, 3),
    ("exit", "settle", 28, 0),
    ("sigkill", "gate", 30, 0),
]


def test_faults_of_a_seed_are_these_on_every_machine():
    faults = random_faults(7, 31, 4, 6, *ALL)

    assert [(each.kind, each.place, each.step, each.rank) for each in faults] == GOLDEN


def test_longer_run_begins_with_the_faults_of_a_shorter_one():
    short, long = (random_faults(3, num_steps, 8, 5, *ALL) for num_steps in (100, 300))

    assert long[: len(short)] == short
    assert len(long) > len(short)


@pytest.mark.parametrize("mean", [1, 3, 10])
def test_faults_are_as_far_apart_as_asked(mean):
    faults = random_faults(1, 10_000, 4, mean, ["exception"], ["forward"])

    assert len(faults) == pytest.approx(10_000 / mean, rel=0.1)


@given(
    seed=st.integers(0, 2**31),
    world_size=st.integers(1, 64),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, unique=True),
    places=st.lists(st.sampled_from(PLACES), min_size=1, unique=True),
)
def test_what_is_drawn_can_fire(seed, world_size, kinds, places):
    assume(
        any(
            place not in {"recovery", "within_update"} if kind == "corrupt" else place != "recovery"
            for kind in kinds
            for place in places
        )
    )

    faults = random_faults(seed, 30, world_size, 2, kinds, places)

    assert all(each.step < 30 and each.rank < world_size for each in faults)
    assert {each.kind for each in faults} <= set(kinds)
    assert {each.place for each in faults} <= set(places)
    assert all((each.kind == "corrupt") == (each.tensor is not None) for each in faults)
    assert all((each.kind == "slow") == (each.seconds is not None) for each in faults)
    assert not [each for each in faults if (each.kind, each.place) == ("corrupt", "within_update")]


@given(seed=st.integers(0, 2**31))
def test_fault_in_a_recovery_is_drawn_with_one_that_begins_it(seed):
    faults = random_faults(seed, 30, 4, 2, *ALL)

    begun = {each.step for each in faults if each.kind != "slow" and each.place != "recovery"}
    assert {each.step for each in faults if each.place == "recovery"} <= begun


def test_recipe_is_turned_into_faults():
    settings = FaultsSettings(
        injected=[EXCEPTION, {**EXCEPTION, "kind": "slow", "seconds": 0.5}],
        random={"seed": 1, "mean_steps_between": 3, "kinds": ["exit"], "places": ["data"]},
    )

    faults = plan_faults(settings, num_steps=20, world_size=2)

    drawn = random_faults(1, 20, 2, 3, ["exit"], ["data"])
    assert drawn
    assert faults == (*settings.injected, *drawn)


@pytest.mark.parametrize("settings", [None, FaultsSettings(injected=(), random=None)])
def test_recipe_without_faults(settings):
    assert plan_faults(settings, num_steps=1, world_size=2) == ()
