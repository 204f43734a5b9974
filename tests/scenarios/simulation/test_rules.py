"""Rules of membership: without one of them the simulation finds what it keeps from happening."""

from __future__ import annotations

import pytest

from tests.scenarios.simulation import simulation
from tests.scenarios.simulation.rules import RULES, switch_off
from tests.scenarios.simulation.test_random import disturb, make_world

SEEDS = range(200)


# Two coordinators that ask at one moment are too rare for chance; the model finds them.
SELDOM = {"agreements never lapse"}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [each for each in RULES if each not in SELDOM])
def test_without_a_rule_a_promise_is_broken(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off(rule, monkeypatch)

    for seed in SEEDS:
        world = make_world(seed)
        try:
            disturb(world, 200)
        except simulation.BrokenPromiseError:
            return
    raise AssertionError(f"{len(SEEDS)} seeds do without the rule")
