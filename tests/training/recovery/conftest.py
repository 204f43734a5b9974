from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.recovery.runs import FaultOutcome, make_fault_job, run_job

Undisturbed = Callable[..., FaultOutcome]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the run of a job without faults; it is run once."""
    known: dict[str, FaultOutcome] = {}

    def run(trainer: str = "ddp", **parts: Any) -> FaultOutcome:
        key = repr((trainer, sorted(parts.items())))
        if key not in known:
            folder: Path = tmp_path_factory.mktemp("undisturbed")
            known[key] = run_job(folder, make_fault_job(trainer, **parts))
            assert known[key].statuses == [0], folder
            assert len(known[key].named("generation_opened")) == 1
        return known[key]

    return run
