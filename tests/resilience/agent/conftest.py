from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.resilience.agent.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    each = Run(folder=tmp_path, port=free_ports(1)[0])
    yield each
    each.end()
