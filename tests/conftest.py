from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import settings

from tests import durations
from tests.shared import Shared

# The same examples each time, so that a change is judged by what it changes; `make test-long`
# draws new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("searching", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("steady")

# A store of torch asks the resolver for the name of each client, of whatever process: what is
# lost of that costs 1 s instead of 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# Without the code that is kept of our modules each process compiles them anew, and tests start
# many processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--judge",
        action="store_true",
        help="seconds by folder, the budget of tests/budget.py, and a second run of what failed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--judge"):
        durations.register(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # Thousands of tests and torch would be looked through by each collection of garbage, of which
    # some tests ask for one.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        # Only now: most tests do without torch.
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """What all processes of the session have in common."""
    base = tmp_path_factory.getbasetemp()
    is_one_of_many = "PYTEST_XDIST_WORKER" in os.environ
    return Shared((base.parent if is_one_of_many else base) / "shared")
