"""No wait of a rank outlives its generation: many faults, and nobody who has to be replaced."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from tests.scenarios.megatron.draws import PLACES
from tests.scenarios.recovery.runs import FaultOutcome, check_same, run_job
from tests.training.megatron.runs import check_nobody_had_to_be_stopped, make_megatron_job

NUM_FAULTS = {"pipeline": 500, "sharded": 500, "long-pipeline": 100}
_IN_A_RUN = 50
RUNS = [(layout, first) for layout, num in NUM_FAULTS.items() for first in range(0, num, _IN_A_RUN)]


def draw_faults(layout: str, first: int) -> tuple[dict[str, Any], ...]:
    """Return a fault for every other step of a run.

    A rank may be a step ahead of another one: a fault in each step would strike before that of the
    step before, or both holders of a shard at once.
    """
    chance = random.Random(f"{layout} {first}")
    places = [place for place in PLACES if place != "recovery"]
    world_size = make_megatron_job(layout).trainer.world_size
    return tuple(
        {
            "kind": chance.choice(("exception", "sigkill")),
            "place": chance.choice(places),
            "rank": chance.randrange(world_size),
            "step": step,
        }
        for step in range(1, 2 * _IN_A_RUN, 2)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "first"), RUNS)
def test_ranks_leave_a_broken_generation_by_themselves(
    tmp_path: Path, undisturbed: Callable[[Job], FaultOutcome], layout: str, first: int
) -> None:
    values: dict[str, Any] = {
        "max_steps": 2 * _IN_A_RUN + 1,
        # Whoever waits on is found by the deadline for stopping, and by no other.
        "settings": {"hang_deadline_s": 60},
    }
    job = make_megatron_job(layout, **values)
    faults = draw_faults(layout, first)

    outcome = run_job(tmp_path, make_megatron_job(layout, faults=faults, **values))

    check_same(outcome, undisturbed(job), faults=faults)
    check_nobody_had_to_be_stopped(outcome)
