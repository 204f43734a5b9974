"""The matrix of faults with a trainer that knows no torch model: the loop, the agent, recovery."""

from __future__ import annotations

import pytest

from tests.cases import slow
from tests.scenarios.recovery.matrix import pack, spread_faults
from tests.scenarios.recovery.runs import check_same, make_fault_job, run_job

NUM_STEPS = 70
HANG_DEADLINE_S = 1.0
"""A step of the toy takes a few milliseconds."""
MODULE = "tests.recipes_training.toy"


@pytest.mark.parametrize("trainer", [slow("ddp"), "hybrid"])
def test_toy_survives_faults_of_each_kind_in_each_place(tmp_path, undisturbed, trainer):
    (faults,) = pack(spread_faults(trainer), NUM_STEPS)

    check_toy(tmp_path, undisturbed, trainer, faults)


def check_toy(folder, undisturbed, trainer, faults) -> None:
    job = make_fault_job(
        trainer,
        max_steps=NUM_STEPS,
        faults=faults,
        settings={"hang_deadline_s": HANG_DEADLINE_S},
    )

    outcome = run_job(folder, job, module=MODULE)

    check_same(outcome, undisturbed(trainer, max_steps=NUM_STEPS, module=MODULE), faults=faults)
    assert outcome.losses[-1] < outcome.losses[0]
