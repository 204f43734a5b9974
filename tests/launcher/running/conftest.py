from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.running.local_world import end_all, prepare


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Path]:
    """A folder in which runs on this machine do as a test says; none outlives the test."""
    prepare(tmp_path)
    yield tmp_path
    end_all(tmp_path)
