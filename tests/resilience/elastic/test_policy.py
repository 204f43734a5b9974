"""When a run grows, and to which size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.elastic.policy import (
    Policy,
    Sizing,
    note_came,
    note_left,
    note_size,
    plan_growth,
)

POLICY = Policy(sizes=(1, 2, 4), hold_s=5.0, snooze_s=60.0)


def sizing(**came_s: float) -> Sizing:
    return Sizing(came_s=came_s)


@pytest.mark.parametrize(("num", "size"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_the_largest_size_that_nodes_suffice_for_is_taken(num: int, size: int) -> None:
    assert POLICY.fit(num) == size


def test_a_node_has_to_be_there_for_a_while() -> None:
    known = sizing(n1=10.0)

    early = plan_growth(POLICY, known, size=1, waiting=["n1"], now_s=14.9)
    late = plan_growth(POLICY, known, size=1, waiting=["n1"], now_s=15.0)

    assert early.nodes == ()
    assert early.due_s == 15.0
    assert late.nodes == ("n1",)


def test_a_size_that_is_not_allowed_waits_for_more_nodes() -> None:
    known = sizing(n2=0.0, n3=0.0)

    few = plan_growth(POLICY, known, size=2, waiting=["n2"], now_s=100.0)
    enough = plan_growth(POLICY, known, size=2, waiting=["n2", "n3"], now_s=100.0)

    assert few.nodes == ()
    assert few.reason == "3 nodes are there; sizes allowed: 1, 2, 4"
    assert enough.nodes == ("n2", "n3")


def test_a_size_is_kept_for_a_while() -> None:
    known = note_size(sizing(n1=0.0), 2, 1, 100.0)

    assert plan_growth(POLICY, known, size=1, waiting=["n1"], now_s=159.0).due_s == 160.0
    assert plan_growth(POLICY, known, size=1, waiting=["n1"], now_s=160.0).nodes == ("n1",)
    assert note_size(known, 1, 1, 500.0) == known


def test_a_node_that_leaves_again_and_again_is_waited_for_twice_as_long() -> None:
    known, now_s = note_size(Sizing(), 1, 2, 0.0), 0.0
    waits = []
    for _ in range(4):
        known = note_size(note_left(POLICY, known, "n1", now_s), 2, 1, now_s)
        known = note_came(known, "n1", now_s)
        due_s = plan_growth(POLICY, known, size=1, waiting=["n1"], now_s=now_s).due_s
        waits.append(due_s - now_s)
        now_s = due_s
        known = note_size(known, 1, 2, now_s)

    assert waits == [60.0, 120.0, 240.0, 480.0]


def test_a_node_that_leaves_once_a_month_waits_no_longer_each_time() -> None:
    known, now_s = note_came(note_size(Sizing(), 1, 2, 0.0), "n1", 0.0), 0.0
    waits = []
    for _ in range(12):
        now_s += 30 * 86_400.0
        known = note_size(note_left(POLICY, known, "n1", now_s), 2, 1, now_s)
        known = note_came(known, "n1", now_s + 1800.0)
        due_s = plan_growth(POLICY, known, size=1, waiting=["n1"], now_s=now_s).due_s
        waits.append(due_s - now_s)
        known = note_size(known, 1, 2, now_s := due_s)

    assert waits == [1800.0 + POLICY.hold_s] * 12


@pytest.mark.parametrize("hold_s", [0.0, 0.5, 5.0])
def test_a_node_that_flaps_each_second_changes_the_run_once_a_snooze_at_most(hold_s: float) -> None:
    policy = Policy(sizes=(3, 4), hold_s=hold_s, snooze_s=60.0)
    sizing, size, grown = Sizing(), 3, list[float]()

    for tenth in range(36_000):
        now_s = tenth / 10
        if tenth % 10 == 0:
            sizing = note_came(sizing, "n3", now_s)
        elif tenth % 10 == 8:
            sizing = note_left(policy, sizing, "n3", now_s)
            sizing, size = note_size(sizing, size, 3, now_s), 3
        if size == 3 and "n3" in sizing.came_s:
            growth = plan_growth(policy, sizing, size=3, waiting=["n3"], now_s=now_s)
            if growth.nodes:
                sizing, size = note_size(sizing, 3, 4, now_s), 4
                grown.append(now_s)

    assert all(late - early >= 60.0 for early, late in pairwise(grown))
    assert bool(grown) == (hold_s < 0.8)


@given(
    sizes=st.sets(st.integers(1, 8), min_size=1),
    size=st.integers(1, 8),
    num_waiting=st.integers(0, 8),
    now_s=st.floats(0.0, 1e6),
)
def test_a_run_grows_to_allowed_sizes_alone(
    sizes: set[int], size: int, num_waiting: int, now_s: float
) -> None:
    policy = Policy(sizes=tuple(sorted(sizes)), hold_s=0.0, snooze_s=0.0)
    waiting = [f"n{number}" for number in range(num_waiting)]

    growth = plan_growth(policy, Sizing(), size=size, waiting=waiting, now_s=now_s)

    possible = [each for each in sizes if size < each <= size + num_waiting]
    assert size + len(growth.nodes) == max(possible, default=size)
    assert list(growth.nodes) == waiting[: len(growth.nodes)]
