from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.workers import Workers, start_workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with start_workers() as started:
        yield started
