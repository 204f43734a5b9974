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
)
from tests.resilience.checkpointless.recovery_runs import LAYOUTS
from tests.resilience.rank_processes import PRELOADED, TIMEOUT_S, run_ranks

SHARDED, WHOLE = LAYOUTS
PRELOADED.append(scenarios.__name__)  # else each process imports it again

pytestmark = [
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.parametrize(
        ("channels", "layout"),
        [
            pytest.param(GlooChannels, SHARDED, id="gloo-2-replicas-x-2-shards"),
            pytest.param(GlooChannels, WHOLE, id="gloo-4-replicas", marks=pytest.mark.slow),
            pytest.param(AsyncChannels, SHARDED, id="queues-2-replicas-x-2-shards"),
            pytest.param(AsyncChannels, WHOLE, id="queues-4-replicas"),
        ],
    ),
]
each_kind = pytest.mark.parametrize(
    "is_replaced", [pytest.param(False, id="raises"), pytest.param(True, id="replaced")]
)


def run(scenario, channels, *arguments):
    """Run a scenario; one over gloo in a process that can be killed with all its groups."""
    if channels is GlooChannels:
        run_ranks(_run_alone, 1, scenario, channels, *arguments)
    else:
        scenario(channels, *arguments)


def _run_alone(_rank, _world_size, scenario, *arguments):
    scenario(*arguments)


@each_kind
@pytest.mark.parametrize("place", scenarios.PLACES)
def test_each_rank_fails_in_turn(channels, layout, place, is_replaced):
    run(scenarios.each_rank_fails_in_turn, channels, layout, place, is_replaced)


@each_kind
@pytest.mark.parametrize("place", ["half", "summed", "in_update"])
def test_fault_in_the_first_step(channels, layout, place, is_replaced):
    run(scenarios.first_step, channels, layout, place, is_replaced)


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
def test_fault_while_a_rank_is_repaired(channels, layout, who, place, is_replaced):
    run(scenarios.transfer_fails, channels, layout, who, place, is_replaced)


@each_kind
@pytest.mark.parametrize("rank", [1, 2])
def test_fault_while_ranks_roll_forward(channels, layout, rank, is_replaced):
    run(scenarios.roll_forward_fails, channels, layout, rank, is_replaced)


@each_kind
@pytest.mark.parametrize("rank", [1, 2])
def test_fault_before_a_rank_rolls_forward(channels, layout, rank, is_replaced):
    run(scenarios.fails_before_it_resumes, channels, layout, rank, is_replaced)


@each_kind
def test_same_rank_fails_again_and_again(channels, layout, is_replaced):
    run(scenarios.same_rank_fails_again_and_again, channels, layout, is_replaced)


@pytest.mark.parametrize("seed", range(5))
def test_random_faults(channels, layout, seed):
    print(f"seed {seed}")  # noqa: T201 - a failure shows it
    run(scenarios.random_faults, channels, layout, seed)


@pytest.mark.parametrize(
    ("number", "place", "name"),
    [
        pytest.param(0, "forward", "blocked", id="weight-before-forward"),
        pytest.param(3, "reduced", "blocked", id="moment-before-the-gate"),
        pytest.param(0, "before_update", "blocked", id="weight-after-the-gate"),
        pytest.param(3, "before_update", "summed", id="moment-after-a-gate-nobody-else-passed"),
    ],
)
def test_changed_state_is_found_and_repaired(channels, layout, number, place, name):
    run(scenarios.changed_state_is_repaired, channels, layout, place, name, number)


def test_changed_source_sends_nothing(channels, layout):
    run(scenarios.changed_source_sends_nothing, channels, layout)


def test_state_that_changed_after_the_last_update_is_found(channels, layout):
    run(scenarios.changed_at_the_end, channels, layout)


def test_state_that_missed_a_generation_counts_as_none(channels, layout):
    run(scenarios.missed_generation, channels, layout)


def test_update_that_holds_a_collective_is_refused(channels, layout):
    run(scenarios.update_with_a_collective, channels, layout)


def test_one_shard_fails_before_the_gate(channels, layout):
    run(scenarios.one_shard_fails_before_the_gate, channels, layout)
