from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resilience.data.job import Job
from tests.resilience.data.scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """The jobs of a test, which end with it."""
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file as long as which a source fails."""
    path = tmp_path / "marker"
    path.touch()
    return path


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe that a source waits for."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path
