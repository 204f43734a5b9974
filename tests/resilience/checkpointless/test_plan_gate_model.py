"""The gate and roll-forward, proved for 2 replicas x 2 shards; see gate_model.py."""

from __future__ import annotations

from functools import cache

import pytest

from tests.cases import slow
from tests.resilience.checkpointless.gate_model import RULES, Model
from tests.resilience.checkpointless.gate_search import Outcome, explore

BREAKS = {
    "gate over all ranks": "lost: a step that a whole rank had passed or ended",
    "a gate": "lost: a step that a whole rank had passed or ended",
    "gradients kept": "lost: a step that a whole rank had passed or ended",
    "update without collective": "needless fallback: no fault took all copies of a shard",
    "abort order": "garbage: a state holds what no run without faults has",
    "gate counted": "lost: a step that a whole rank had passed or ended",
    "sum of the node": "lost: a step that a whole rank had passed or ended",
    "sum of all nodes": "lost: a step that a whole rank had passed or ended",
    "lost leader": "lost: a step that a whole rank had passed or ended",
    "generation of a word": "lost: a step that a whole rank had passed or ended",
    "step of a word": "lost: a step that a whole rank had passed or ended",
    "atomic end": "garbage: a state holds what no run without faults has",
    "late report": "lost: a step that a whole rank had passed or ended",
    "fence": "lost: a step that a whole rank had passed or ended",
    "interruption": "deadlock",
    "gradients outlive a generation": "lost: a step that a generation had begun with",
    "torn told": "garbage: a state holds what no run without faults has",
    "proof kept": "lost: a step that a generation had begun with",
}


def assert_clean(outcome: Outcome) -> None:
    assert outcome.breaks == {}
    assert outcome.num_finished > 0


@pytest.mark.parametrize("num_steps", [1, 2])
def test_one_fault_anywhere_is_mended_without_a_fallback(num_steps: int) -> None:
    outcome = explore(Model(num_faults=1, num_steps=num_steps))

    assert_clean(outcome)
    assert outcome.num_fallbacks == 0


@cache
def two_faults() -> Outcome:
    return explore(Model(num_faults=2, num_steps=1))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_two_faults_lose_no_committed_step_and_mix_nothing(num_steps: int) -> None:
    outcome = two_faults() if num_steps == 1 else explore(Model(num_steps=num_steps))

    assert_clean(outcome)
    assert outcome.num_states > 35_000, "far fewer states: has a move gone missing?"


def test_both_holders_of_a_shard_lost_is_the_way_to_a_fallback() -> None:
    assert two_faults().num_fallbacks > 0


@pytest.mark.parametrize(
    "words",
    [
        "all 4 ranks",
        "its gate was passed",
        "passed the gate",
        "failed after the gate",
        "failed within the update",
        "failed while receiving state",
        "no state",
        "no healthy holder",
    ],
)
def test_two_faults_call_for_every_kind_of_plan(words: str) -> None:
    assert any(words in plan.reason for plan in two_faults().plans)


@pytest.mark.slow
def test_a_dropped_rank_that_comes_back_changes_nothing() -> None:
    assert_clean(explore(Model(ghosts=True)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Model(num_faults=3), id="three-faults"),
        pytest.param(Model(num_faults=3, num_steps=2), id="three-faults-two-steps"),
        pytest.param(Model(ghosts=True, num_steps=2), id="dropped-ranks-two-steps"),
    ],
)
def test_more_faults_over_more_steps_break_nothing(model: Model) -> None:
    assert_clean(explore(model))


_LONG = ("fence", "late report", "generation of a word", "step of a word")


@pytest.mark.parametrize("rule", [slow(each, id=each) if each in _LONG else each for each in RULES])
def test_model_sees_that_a_rule_is_missing(rule: str) -> None:
    """The test of the test: each rule is needed, and the shortest way to show it is short."""
    outcome = explore(Model(without=rule, num_steps=1 + (rule == "step of a word")))

    assert list(outcome.breaks) == [BREAKS[rule]], outcome.breaks
