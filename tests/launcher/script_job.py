"""A job with a program of a user's, for tests that need no run of it."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.job import Job
from tests.launcher.shipped import shipped_job, with_values

RECIPE = "script/torch_ddp"
HERE = {
    "local": {},
    "slurm": {"trainer.folder": "/fsx/code"},
    "job": {"trainer.folder": "/fsx/code"},
}


def script_job(kind: str = "local", **trainer: Any) -> Job:
    """Return the shipped script's job with other values below `trainer`."""
    values = {**HERE.get(kind, {}), **{f"trainer.{key}": each for key, each in trainer.items()}}
    return Job.model_validate(with_values(shipped_job(RECIPE, kind), values))


def refused(kind: str = "local", **values: Any) -> list[str]:
    """Return the messages that a job with these values gets; the name has __ for a dot."""
    changes = {key.replace("__", "."): each for key, each in values.items()}
    with pytest.raises(ValueError, match=r"\S") as caught:
        Job.model_validate(with_values(shipped_job(RECIPE, kind), changes))
    text = str(caught.value).partition("Value error, ")[2].partition(" [type=")[0]
    return text.splitlines()
