"""Fixtures of runs of Megatron."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.job import Job
from tests.scenarios.recovery.runs import FaultOutcome, run_job
from tests.shared import Shared


@pytest.fixture
def undisturbed(shared: Shared) -> Callable[[Job], FaultOutcome]:
    """Return the run of a job without faults; it is run once."""

    def run(job: Job) -> FaultOutcome:
        def make(folder: Path) -> None:
            outcome = run_job(folder, job)
            assert outcome.statuses == [0], folder
            assert not outcome.left_behind

        return FaultOutcome(shared.make_once(f"megatron {job.to_json()}", make), [0])

    return run
