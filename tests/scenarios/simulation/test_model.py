"""Founding and succession as a model: each promise in all worlds, and what breaks without a rule.

Where a test says `every`, all worlds are visited that there are with its troubles. Where it says
`nearest` or `chance`, only some are. With `--log-cli-level=INFO` each test says how many.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tests.cases import slow
from tests.scenarios.simulation.model import Model, Troubles
from tests.scenarios.simulation.model_search import explore, wander
from tests.scenarios.simulation.model_world import World
from tests.scenarios.simulation.rules import RULES, switch_off

_LOG = logging.getLogger(__name__)

PAUSE = Troubles(pauses=1)
LOSS = Troubles(losses=1)
BOTH = Troubles(losses=1, pauses=1)
CUT = Troubles(cuts=1)
CUTS = Troubles(cuts=2, rivals=1)
MANY = Troubles(losses=2, pauses=2, cuts=2, resets=2, rivals=2)

Sizes = tuple[int, int, Troubles]
BEGUN: Callable[[Model], World] = Model.begun
FOUNDING: Callable[[Model], World] = Model.begin
FAR = 500_000
"""Worlds that are visited where there are too many."""
MOVES = 150
"""Of a way that chance takes, before the troubles end."""


def check(
    sizes: Sizes,
    begin: Callable[[Model], World],
    worlds_min: int,
    *,
    shares_folder: bool = True,
) -> None:
    model = Model(*sizes, shares_folder=shares_folder)

    outcome = explore(model, begin(model))

    _LOG.info("%s", outcome)
    assert outcome.breaks == {}
    assert outcome.is_complete
    assert outcome.num_worlds > worlds_min, f"has a move gone missing? {outcome}"


@pytest.mark.parametrize(
    ("sizes", "begin", "worlds_min"),
    [
        pytest.param((2, 1, Troubles()), FOUNDING, 300, id="2+1-founding"),
        pytest.param((1, 2, Troubles()), FOUNDING, 1_000, id="1+2-founding"),
        pytest.param((2, 1, LOSS), BEGUN, 450, id="2+1-loss"),
        pytest.param((2, 1, PAUSE), BEGUN, 10_000, id="2+1-pause"),
        pytest.param((1, 2, Troubles(pauses=1, rivals=1)), BEGUN, 1_000, id="1+2-pause-rival"),
    ],
)
def test_every_interleaving_keeps_every_promise(
    sizes: Sizes, begin: Callable[[Model], World], worlds_min: int
) -> None:
    check(sizes, begin, worlds_min)


@pytest.mark.parametrize(
    ("troubles", "begin", "worlds_min"),
    [
        pytest.param(Troubles(), FOUNDING, 200, id="founding"),
        pytest.param(LOSS, BEGUN, 300, id="loss"),
        pytest.param(PAUSE, BEGUN, 4_000, id="pause"),
    ],
)
def test_every_interleaving_without_a_common_folder_keeps_every_promise(
    troubles: Troubles, begin: Callable[[Model], World], worlds_min: int
) -> None:
    """Not with a loss while the run begins: who is started again has forgotten its agreement."""
    check((2, 1, troubles), begin, worlds_min, shares_folder=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sizes", "begin", "worlds_min"),
    [
        pytest.param((1, 2, BOTH), BEGUN, 90_000, id="1+2-loss-pause"),
        pytest.param((1, 2, LOSS), FOUNDING, 300_000, id="1+2-founding-loss"),
        pytest.param((2, 1, LOSS), FOUNDING, 150_000, id="2+1-founding-loss"),
        pytest.param((2, 1, BOTH), BEGUN, 1_500_000, id="2+1-loss-pause"),
    ],
)
def test_every_interleaving_of_more_troubles_keeps_every_promise(
    sizes: Sizes, begin: Callable[[Model], World], worlds_min: int
) -> None:
    check(sizes, begin, worlds_min)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "begin"),
    [
        pytest.param((2, 1, PAUSE), FOUNDING, id="2+1-founding-pause"),
        pytest.param((1, 2, PAUSE), FOUNDING, id="1+2-founding-pause"),
        pytest.param((2, 2, CUTS), BEGUN, id="2+2-two-cuts-rival"),
    ],
)
def test_nearest_of_too_many_interleavings_keep_every_promise(
    sizes: Sizes, begin: Callable[[Model], World]
) -> None:
    """Not all are visited; whether the others go on at last is not known either."""
    model = Model(*sizes)

    outcome = explore(model, begin(model), worlds_max=FAR)

    _LOG.info("%s", outcome)
    assert outcome.breaks == {}
    assert outcome.is_complete or outcome.num_worlds >= FAR


WAYS = [
    pytest.param((1, 2, MANY), False, id="1+2"),
    pytest.param((2, 1, MANY), False, id="2+1"),
    pytest.param((2, 2, MANY), False, id="2+2"),
    pytest.param((2, 2, MANY), True, id="2+2-shards"),
]
"""Sizes and troubles, and whether each node holds a shard."""


@pytest.mark.parametrize(("sizes", "is_sharded"), WAYS)
def test_ways_that_chance_takes_keep_every_promise(sizes: Sizes, is_sharded: bool) -> None:
    check_ways(sizes, is_sharded, range(30))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("sizes", "is_sharded"), WAYS)
def test_many_ways_that_chance_takes_keep_every_promise(sizes: Sizes, is_sharded: bool) -> None:
    check_ways(sizes, is_sharded, range(30, 10_000))


def check_ways(sizes: Sizes, is_sharded: bool, seeds: range) -> None:
    model = Model(*sizes, is_sharded=is_sharded)
    for begin in (model.begin(), model.begun()):
        for seed in seeds:
            assert wander(model, begin, seed, num_moves=MOVES) == "", f"seed {seed}"


BREAKS: dict[str, tuple[Sizes, bool, str]] = {
    "the founding record": ((1, 2, LOSS), False, "two successors: both are generation 0"),
    "more than half": ((2, 2, CUT), False, "two successors: both are generation 1"),
    "the record of a tie": ((2, 2, CUT), False, "two successors: both are generation 1"),
    "agreements never lapse": (
        (2, 1, Troubles(pauses=1, resets=1)),
        False,
        "two successors: both are generation 1",
    ),
    "evidence for standbys alone": (
        (1, 2, Troubles(pauses=1, patience=1)),
        False,
        "two worlds: generation 0 commits after",
    ),
    "patience for the last holder": ((2, 1, PAUSE), True, "lost: generation 1 begins at 0"),
    "end of file is silence": (
        (1, 2, Troubles(pauses=1, resets=1)),
        False,
        "lost: generation 101 begins at 0",
    ),
}
"""By rule, in which world it is missed, whether each node holds a shard, and what breaks."""


_LONG = ("more than half", "the record of a tie", "agreements never lapse")


@pytest.mark.parametrize("rule", [slow(each, id=each) if each in _LONG else each for each in RULES])
def test_without_a_rule_the_model_finds_the_break(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, is_sharded, words = BREAKS[rule]
    switch_off(rule, monkeypatch)
    model = Model(*sizes, is_sharded=is_sharded)

    outcome = explore(model, model.begun())

    _LOG.info("%s", outcome)
    assert any(text.startswith(words) for text in outcome.breaks), str(outcome)


def test_limit_agent_that_is_started_again_while_a_run_begins_has_forgotten_its_agreement() -> None:
    """As docs/recovery.md says. With a common folder every interleaving of this world is visited,
    and keeps every promise: 2+1-founding-loss.
    """
    model = Model(2, 1, LOSS, shares_folder=False)

    outcome = explore(model, model.begin())

    _LOG.info("%s", outcome)
    assert "two successors: both are generation 0" in outcome.breaks, str(outcome)
