from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resilience.agent.runs import Run, free_port


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    each = Run(folder=tmp_path, port=free_port())
    yield each
    each.end()
