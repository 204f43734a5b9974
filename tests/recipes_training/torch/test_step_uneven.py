"""Where some workers have one micro batch more than others, each still weighs the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import slow
from tests.recipes_training.jobs import LLAMA, make_job

SIZES = {"max_steps": 6, "global_batch_size": 10, "micro_batch_size": 2}
HYBRID = {"sharding": "hybrid", "num_replicas": 2, "num_devices": 4}
FULL = {"sharding": "full", "num_devices": 3}
DDP = {"num_devices": 4}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(HYBRID, id="hybrid"),
        slow(FULL, id="full"),
        slow(DDP, id="ddp"),
    ],
)
def test_losses_are_those_of_one_worker(
    workers, reference, tmp_path, layout: dict[str, Any]
) -> None:
    alone = reference(make_job(trainer=SIZES, model=LLAMA))

    many = workers.run(make_job(trainer={**SIZES, **layout}, model=LLAMA), tmp_path)

    assert many.losses == pytest.approx(alone.losses, rel=1e-5)
    norms = [each["grad_norm"] for each in alone.steps]
    assert [each["grad_norm"] for each in many.steps] == pytest.approx(norms, rel=1e-5)
