from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resilience.tiered.daemons import Daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(folder=tmp_path / "arena", budget_mib=64, options=["--keep", "9"]) as running:
        yield running.start()
