from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.recovery.runs import FaultOutcome, make_fault_job, run_job
from tests.shared import Shared

Undisturbed = Callable[..., FaultOutcome]


@pytest.fixture(scope="session")
def undisturbed(shared: Shared) -> Undisturbed:
    """Return the run of a job without faults; it is run once."""

    def run(
        trainer: str = "ddp", *, module: str = "recipes_training", **parts: Any
    ) -> FaultOutcome:
        job = make_fault_job(trainer, **parts)

        def make(folder: Path) -> None:
            outcome = run_job(folder, job, module=module)
            assert outcome.statuses == [0], folder
            assert len(outcome.named("generation_opened")) == 1
            assert not outcome.left_behind

        return FaultOutcome(shared.make_once(f"agents of {module} {job.to_json()}", make), [0])

    return run
