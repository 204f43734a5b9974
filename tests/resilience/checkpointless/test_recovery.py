"""Ranks under `Recovery` that fail anywhere, over gloo and over queues like an accelerator's.

What has to come of a fault is in `recovery_scenarios`; the ranks, and the agent that
breaks their generations, in `recovery_runs`.
"""

from __future__ import annotations

import pytest

from tests.resilience.checkpointless import recovery_scenarios as scenarios
from tests.resilience.checkpointless.recovery_channels import (
    AsyncChannels,
    GlooChannels,
    NaiveChannels,
    StaleChannels,
)
from tests.resilience.checkpointless.recovery_runs import LAYOUTS
from tests.resilience.rank_processes import PRELOADED, TIMEOUT_S, run_ranks

SHARDED, WHOLE = LAYOUTS
PRELOADED.append(scenarios.__name__)  # else each process imports it again

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
each_layout = pytest.mark.parametrize(
    "layout", [pytest.param(SHARDED, id="queues-2-x-2"), pytest.param(WHOLE, id="queues-4")]
)
each_kind = pytest.mark.parametrize(
    "is_replaced", [pytest.param(False, id="raises"), pytest.param(True, id="replaced")]
)


@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        *((scenarios.each_rank_fails_in_turn, (place, True)) for place in scenarios.PLACES),
        (scenarios.each_rank_fails_in_turn, ("in_update", False)),
        (scenarios.transfer_fails, ("target", "receiving", False)),
        (scenarios.transfer_fails, ("source", "sending", False)),
        (scenarios.roll_forward_fails, (2, True)),
        (scenarios.same_rank_fails_again_and_again, (False,)),
        *((scenarios.random_faults, (seed,)) for seed in range(3)),
        (scenarios.changed_state_is_repaired, ("before_update", "blocked", 0)),
        (scenarios.update_with_a_collective, ()),
    ],
)
def test_ranks_over_gloo_recover_alike(scenario, arguments):
    """In a process that can be killed with all its groups."""
    run_ranks(_run_alone, 1, scenario, GlooChannels, SHARDED, *arguments)


def _run_alone(_rank, _world_size, scenario, *arguments):
    scenario(*arguments)


@each_layout
@each_kind
@pytest.mark.parametrize("place", scenarios.PLACES)
def test_each_rank_fails_in_turn(layout, place, is_replaced):
    scenarios.each_rank_fails_in_turn(AsyncChannels, layout, place, is_replaced)


@each_layout
@each_kind
@pytest.mark.parametrize("place", ["half", "summed", "in_update"])
def test_fault_in_the_first_step(layout, place, is_replaced):
    scenarios.first_step(AsyncChannels, layout, place, is_replaced)


@each_layout
@each_kind
@pytest.mark.parametrize(
    ("who", "place"),
    [
        ("target", "resume"),
        ("target", "receiving"),
        ("target", "received"),
        ("source", "recovery"),
        ("source", "sending"),
        ("bystander", "recovery"),
    ],
)
def test_fault_while_a_rank_is_repaired(layout, who, place, is_replaced):
    scenarios.transfer_fails(AsyncChannels, layout, who, place, is_replaced)


@each_layout
@each_kind
@pytest.mark.parametrize("rank", [1, 2])
def test_fault_while_ranks_roll_forward(layout, rank, is_replaced):
    scenarios.roll_forward_fails(AsyncChannels, layout, rank, is_replaced)


@each_layout
@each_kind
@pytest.mark.parametrize("rank", [1, 2])
def test_fault_before_a_rank_rolls_forward(layout, rank, is_replaced):
    scenarios.fails_before_it_resumes(AsyncChannels, layout, rank, is_replaced)


@each_layout
@each_kind
def test_same_rank_fails_again_and_again(layout, is_replaced):
    scenarios.same_rank_fails_again_and_again(AsyncChannels, layout, is_replaced)


@each_layout
@pytest.mark.parametrize("seed", range(5))
def test_random_faults(layout, seed):
    print(f"seed {seed}")  # noqa: T201 - a failure shows it
    scenarios.random_faults(AsyncChannels, layout, seed)


@each_layout
@pytest.mark.parametrize(
    ("number", "place", "name"),
    [
        pytest.param(0, "forward", "blocked", id="weight-before-forward"),
        pytest.param(3, "reduced", "blocked", id="moment-before-the-gate"),
        pytest.param(0, "before_update", "blocked", id="weight-after-the-gate"),
        pytest.param(3, "before_update", "summed", id="moment-after-a-gate-nobody-else-passed"),
    ],
)
def test_changed_state_is_found_and_repaired(layout, number, place, name):
    scenarios.changed_state_is_repaired(AsyncChannels, layout, place, name, number)


@each_layout
@pytest.mark.parametrize(
    "scene",
    [
        scenarios.changed_source_sends_nothing,
        scenarios.changed_at_the_end,
        scenarios.missed_generation,
        scenarios.update_with_a_collective,
        scenarios.one_shard_fails_before_the_gate,
    ],
)
def test_state_is_found_repaired_or_refused_as_the_scene_says(layout, scene):
    scene(AsyncChannels, layout)


pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
SHARDED = "2-replicas-x-2-shards"


def test_naive_gate_loses_a_committed_step():
    """It lets shard 0 into an update whose gate shard 1 has never entered."""
    with pytest.raises(AssertionError, match=r"no step is held for every shard: newest are "):
        scenarios.one_shard_fails_before_the_gate(NaiveChannels, SHARDED)


@pytest.mark.parametrize("place", ["reduced", "gate", "entering"])
def test_naive_gate_brings_ranks_ahead_of_the_plan(place):
    with pytest.raises(AssertionError, match=r"Fault\(rank="):
        scenarios.each_rank_fails_in_turn(NaiveChannels, SHARDED, place, is_replaced=False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", scenarios.PLACES)
def test_what_an_aborted_collective_leaves_does_not_matter(layout, place):
    scenarios.each_rank_fails_in_turn(StaleChannels, layout, place, is_replaced=True)
