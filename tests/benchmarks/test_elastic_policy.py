"""The simulated month of an elastic run: its account is right, and it meets its bars."""

from __future__ import annotations

import pytest

from benchmarks.elastic_policy import (
    DAY_S,
    FORCED_S,
    GOODPUT_BAR,
    LIFE_S,
    LOST_BAR,
    LOST_S,
    NUM_NODES,
    PLANNED_S,
    RATES,
    make_failures,
    measure,
    simulate,
    sizes,
)
from resilience.elastic.policy import Policy


@pytest.mark.parametrize("rate", RATES.values())
def test_a_run_that_changes_by_single_nodes_loses_little_beyond_what_is_missing(
    rate: float,
) -> None:
    outcomes = dict(measure(rate, 5))

    for each in outcomes["units of 1"]:
        assert each.goodput > GOODPUT_BAR
        assert 0 < each.lost < LOST_BAR
    elastic, fixed = outcomes["units of 1"], outcomes["16 standbys"]
    assert min(each.goodput for each in elastic) > max(each.goodput for each in fixed)


def test_one_node_that_is_away_for_a_day_costs_itself_and_two_changes() -> None:
    failures = [(DAY_S, "n7", 2 * DAY_S)]
    policy = Policy(sizes=sizes(1))

    found = simulate(policy, failures, NUM_NODES)

    waits_s = policy.hold_s
    changes_s = NUM_NODES * (LOST_S + PLANNED_S) + (NUM_NODES - 1) * FORCED_S
    there_s = NUM_NODES * LIFE_S - DAY_S
    assert (found.num_forced, found.num_planned) == (1, 1)
    assert found.lost == pytest.approx((changes_s + waits_s) / there_s)
    assert found.goodput * NUM_NODES * LIFE_S == pytest.approx(there_s - changes_s - waits_s)


def test_nodes_fail_as_often_as_was_published() -> None:
    found = [len(make_failures(rate, NUM_NODES, 0)) for rate in RATES.values()]

    # In 30 days of 1,000 nodes, less those that are away just then.
    assert found == [pytest.approx(114, abs=30), pytest.approx(195, abs=40)]
