"""Random schedules of faults, each with a seed: same bits, no step lost."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.scenarios.recovery.runs import SHARDINGS, check_same, make_fault_job, run_job
from tests.scenarios.recovery.schedules import draw

SEEDS_PER_RUN = 10
STEPS_PER_SEED = 32
NUM_STEPS = SEEDS_PER_RUN * STEPS_PER_SEED + 2


def report(outcome, seeds, faults, steps_per_seed) -> None:
    """Print a line for each seed: what it did and how many recoveries that took."""
    opened = [each.step for each in outcome.named("rank_recovered") if each.rank == 0]
    for number, seed in enumerate(seeds):
        steps = range(1 + number * steps_per_seed, 1 + (number + 1) * steps_per_seed)
        kinds = Counter(each["kind"] for each in faults if each["step"] in steps)
        num_recoveries = sum(step in steps for step in opened)
        line = (
            f"seed {seed}: {sum(kinds.values())} faults {dict(kinds)}, {num_recoveries} recoveries"
        )
        sys.stdout.write(f"{line}\n")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, SEEDS_PER_RUN))
def test_run_survives_faults_of_many_seeds(tmp_path, undisturbed, first):
    trainer = list(SHARDINGS)[first // SEEDS_PER_RUN % 2]
    seeds = range(first, first + SEEDS_PER_RUN)
    faults = draw(trainer, seeds, steps_per_seed=STEPS_PER_SEED, mean_steps_between=3)

    outcome = run_job(tmp_path, make_fault_job(trainer, max_steps=NUM_STEPS, faults=faults))

    report(outcome, seeds, faults, STEPS_PER_SEED)
    check_same(outcome, undisturbed(trainer, max_steps=NUM_STEPS), faults=faults)
