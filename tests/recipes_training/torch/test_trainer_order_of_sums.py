"""With one order of sums a run has the same bits at any number of workers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from launcher.job import Job
from tests.cases import slow
from tests.recipes_training.jobs import GPT_OSS, LLAMA, make_job
from tests.scenarios.recovery.runs import FaultOutcome, make_fault_job, run_job

MODELS = {"llama": LLAMA, "gpt-oss": GPT_OSS}
BATCH = {"global_batch_size": 24, "micro_batch_size": 2}
FEW_STEPS = 8
FAULTS = (
    {"kind": "exception", "place": "reduction", "step": 2, "rank": 1},
    {"kind": "sigkill", "place": "within_update", "step": 4, "rank": 2},
    {"kind": "sigkill", "place": "forward", "step": 6, "rank": 0},
)


def _job(num_workers: int, model: dict[str, Any], order: str = "fixed") -> Job:
    trainer = {"order_of_sums": order, "num_devices": num_workers, "max_steps": 6, **BATCH}
    return make_job(trainer=trainer, model=model)


@pytest.mark.parametrize(
    ("model", "num_workers"),
    [
        slow("llama", 2),
        slow("llama", 3),
        slow("llama", 4),
        # Some have three micro batches of the step, the others two.
        pytest.param("llama", 5),
        slow("llama", 6),
        slow("gpt-oss", 2),
        slow("gpt-oss", 3),
        slow("gpt-oss", 4),
    ],
)
def test_any_number_of_workers_has_the_bits_of_one(
    workers, reference, tmp_path, model, num_workers
):
    alone = reference(_job(1, MODELS[model]))

    many = workers.run(_job(num_workers, MODELS[model]), tmp_path)

    assert many.losses == alone.losses
    assert [each["grad_norm"] for each in many.steps] == [each["grad_norm"] for each in alone.steps]
    assert many.weights() == alone.weights()


def test_the_usual_order_has_other_bits_at_another_number_of_workers(workers, reference, tmp_path):
    """Else what is shown above would show nothing."""
    alone = reference(_job(1, LLAMA, "size"))

    many = workers.run(_job(5, LLAMA, "size"), tmp_path)

    assert many.losses == pytest.approx(alone.losses, rel=1e-5)
    assert many.weights() != alone.weights()
    assert alone.weights() != reference(_job(1, LLAMA)).weights()


def test_sharded_sums_have_no_fixed_order() -> None:
    message = "trainer.order_of_sums 'fixed' does not fit trainer.sharding 'hybrid'"
    sharded = {"sharding": "hybrid", "num_replicas": 2, "num_devices": 4}

    with pytest.raises(ValidationError, match=message):
        make_job(trainer={**sharded, "order_of_sums": "fixed"})


def test_a_run_with_faults_has_the_bits_of_one_worker_alone(workers, reference, tmp_path):
    values = {"order_of_sums": "fixed", **BATCH}
    job = make_fault_job("ddp", max_steps=FEW_STEPS, faults=FAULTS, values=values)
    trainer = {**values, "num_devices": 1, "max_steps": FEW_STEPS}
    alone = reference(make_job(trainer={**trainer, "optimizer": {"decay_steps": 400}}))

    outcome = run_job(tmp_path, job)

    assert outcome.statuses == [0], outcome.log(0)
    assert outcome.bits() == FaultOutcome(alone.folder, [0]).bits()
    assert outcome.weights() == alone.weights()
    assert not outcome.named("recovery_fallback")
    assert len(outcome.named("fault_injected")) == len(FAULTS)
    assert not outcome.left_behind
