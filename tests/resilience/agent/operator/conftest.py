from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.resilience.agent.conftest import undisturbed
from tests.resilience.agent.operator.driver import Node
from tests.resilience.agent.runs import Run

__all__ = ["node", "undisturbed"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    run = Run(folder=tmp_path, port=0)
    yield Node(run=run)
    run.end()
