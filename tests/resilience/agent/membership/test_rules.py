"""Rules of membership: without one of them the simulation finds what it keeps from happening."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resilience.agent.coordination import coordinator, opening, votes
from resilience.agent.coordination.founding import Record, judge
from resilience.agent.coordination.membership import State
from tests.resilience.agent.membership import simulation
from tests.resilience.agent.membership.test_random import disturb, make_world

SEEDS = range(60)


def everybody_goes_on(state: State) -> str:
    return votes.GOES_ON


def half_goes_on(state: State) -> str:
    verdict = votes.find_verdict(state)
    return votes.GOES_ON if verdict == votes.TIE else verdict


def any_place_is_given_away(state: State, place: int, *, is_late: bool) -> bool:
    return place not in state.awaited


def whoever_comes_begins_a_run(
    found: Record | None, *, newcomers: tuple[str, ...], **_: object
) -> Record:
    begun = judge(None, run="run", newcomers=newcomers, unchanged_s=0.0)
    assert isinstance(begun, Record)
    return begun


RULES: dict[str, tuple[object, str, Callable[..., object]]] = {
    "more than half, or evidence": (opening, "find_verdict", everybody_goes_on),
    "the record of a tie": (opening, "find_verdict", half_goes_on),
    "patience for the last holder": (opening, "may_give_away", any_place_is_given_away),
    "the founding record": (simulation, "judge", whoever_comes_begins_a_run),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_a_promise_is_broken(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, without = RULES[rule]
    monkeypatch.setattr(owner, name, without)
    if hasattr(coordinator, name):
        monkeypatch.setattr(coordinator, name, without)

    for seed in SEEDS:
        world = make_world(seed)
        try:
            disturb(world, 200)
        except simulation.BrokenPromiseError:
            return
    raise AssertionError(f"{len(SEEDS)} seeds do without the rule")
