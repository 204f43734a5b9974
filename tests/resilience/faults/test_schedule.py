from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience import settings
from resilience.faults.schedule import (
    KINDS,
    PLACES,
    Fault,
    check_faults,
    faults_from,
    random_faults,
)
from resilience.state.layout import make_layout

ALL = (KINDS, PLACES)
_LAYOUT = make_layout(nodes=("n0",), num_local_ranks=2)
EXCEPTION = {"kind": "exception", "place": "forward", "step": 5, "rank": 1}
GOLDEN = [
    ("exception", "gate", 3, 3),
    ("sigstop", "recovery", 7, 3),
    ("exception", "forward", 7, 0),
    ("corrupt", "backward", 9, 0),
    ("slow", "recovery", 11, 2),
    ("sigkill", "gate", 11, 2),
    ("slow", "data", 15, 0),
    ("exception", "backward", 19, 2),
    ("slow", "reduction", 28, 3),
    ("slow", "within_update", 30, 3),
]


def _fault(**changes):
    return Fault(**{**EXCEPTION, **changes})


def test_faults_of_a_seed_are_these_on_every_machine():
    faults = random_faults(7, 31, 4, 6, *ALL)

    assert [(each.kind, each.place, each.step, each.rank) for each in faults] == GOLDEN


def test_longer_run_begins_with_the_faults_of_a_shorter_one():
    short, long = (random_faults(3, num_steps, 8, 5.5, *ALL) for num_steps in (100, 300))

    assert long[: len(short)] == short
    assert len(long) > len(short)


@pytest.mark.parametrize("mean", [1, 2.5, 10])
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
    options = (seed, 30, world_size, 2, kinds, places)
    can_fire = [
        kind != "corrupt" or place != "within_update"
        for kind in kinds
        for place in places
        if place != "recovery"
    ]
    if not any(can_fire):
        with pytest.raises(ValueError, match="beside recovery one that begins a recovery"):
            random_faults(*options)
        return

    faults = random_faults(*options)

    layout = make_layout(nodes=("n0",), num_local_ranks=world_size)
    check_faults(faults, num_steps=30, layout=layout)
    assert {each.kind for each in faults} <= set(kinds)
    assert {each.place for each in faults} <= set(places)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"kind": "oom"}, "kind is 'oom'; choose one of exception, sig", id="kind"),
        pytest.param({"place": "x"}, "place is 'x'; choose one of forward, back", id="place"),
        pytest.param({"step": -1}, "step -1, rank 1, node None: all count from 0", id="step"),
        pytest.param({"node": 0}, "rank 1 and node 0; set exactly one of them", id="both"),
        pytest.param({"rank": None}, "rank None and node None; set exactly one", id="neither"),
        pytest.param({"kind": "corrupt"}, "tensor None; corrupt needs tensor", id="no-tensor"),
        pytest.param({"tensor": "moment"}, "others have none", id="tensor"),
        pytest.param({"kind": "slow"}, "seconds None; slow needs seconds", id="no-seconds"),
        pytest.param({"seconds": 1.0}, "others have none", id="seconds"),
        pytest.param({"kind": "slow", "seconds": 0.0}, "seconds is 0.0; it has", id="no-time"),
        pytest.param(
            {"kind": "corrupt", "tensor": "moment", "place": "within_update"},
            "corrupt has no place within_update: a value changed there is overwritten by the",
            id="corrupt-within-update",
        ),
    ],
)
def test_fault_that_means_nothing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        _fault(**changes)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        pytest.param([{"step": 10}], "step 10 is beyond the last one, 9", id="step"),
        pytest.param([{"rank": 4}], "rank 4 is beyond the last one, 3", id="rank"),
        pytest.param([{"rank": None, "node": 2}], "node 2 is beyond the last one, 1", id="node"),
        pytest.param([{"place": "recovery"}], "no fault at step 5 or later begins", id="alone"),
        pytest.param(
            [{"step": 4}, {"place": "recovery"}], "no fault at step 5 or later", id="too-early"
        ),
        pytest.param(
            [{"kind": "slow", "seconds": 1.0}, {"place": "recovery"}],
            "no fault at step 5 or later begins a recovery",
            id="slow-begins-none",
        ),
    ],
)
def test_fault_that_could_never_fire_is_refused(faults, message):
    faults = [_fault(**each) for each in faults]

    with pytest.raises(ValueError, match=rf"^fault {len(faults) - 1} \(exception .*{message}"):
        check_faults(
            faults, num_steps=10, layout=make_layout(nodes=("n0", "n1"), num_local_ranks=2)
        )


def test_fault_in_the_recovery_from_another_can_fire():
    check_faults([_fault(), _fault(place="recovery", rank=0)], num_steps=10, layout=_LAYOUT)


def test_recipe_is_turned_into_faults():
    written = settings.FaultsSettings(
        injected=[EXCEPTION, {**EXCEPTION, "kind": "slow", "seconds": 0.5}],
        random={"seed": 1, "mean_steps_between": 3, "kinds": ["exit"], "places": ["data"]},
    )

    faults = faults_from(written.model_dump(), num_steps=20, layout=_LAYOUT)

    drawn = random_faults(1, 20, 2, 3, ["exit"], ["data"])
    assert drawn
    assert faults == (_fault(), _fault(kind="slow", seconds=0.5), *drawn)


def test_recipe_without_random_faults():
    assert faults_from({"injected": (), "random": None}, num_steps=1, layout=_LAYOUT) == ()


def test_bad_fault_of_a_recipe_is_named():
    with pytest.raises(ValueError, match=r"^fault 1: rank 1 and node 0; set exactly one"):
        faults_from(
            {"injected": [EXCEPTION, {**EXCEPTION, "node": 0}]}, num_steps=9, layout=_LAYOUT
        )


def test_recipes_know_the_same_kinds_and_places():
    """Settings may import nothing of a feature, so the words stand in both."""
    assert get_args(settings.FaultKind) == KINDS
    assert get_args(settings.FaultPlace) == PLACES
