from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.job import Job
from tests.recipes_training.workers import Outcome, Workers
from tests.shared import Shared

Reference = Callable[[Job], Outcome]


@pytest.fixture(scope="session")
def workers() -> Workers:
    return Workers()


@pytest.fixture(scope="session")
def reference(workers: Workers, shared: Shared) -> Reference:
    """Return the run of a job that others are compared with; it is run once."""

    def run(job: Job) -> Outcome:
        key = f"workers {job.to_json()}"
        folder = shared.make_once(key, lambda made: workers.run(job, made))
        return Outcome(folder, [0] * job.trainer.world_size)

    return run
