from __future__ import annotations

import pytest
from hypothesis import settings

# The same examples each time, so that a change is judged by what it changes; `make test-long`
# draws new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("searching", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is rendered to tests/golden"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
