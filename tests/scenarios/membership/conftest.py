from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.namespaces import NamespaceError, Network
from tests.scenarios.membership.clusters import MakeNetwork
from tests.scenarios.recovery.conftest import undisturbed

__all__ = ["undisturbed"]


@pytest.fixture
def make_network() -> Iterator[MakeNetwork]:
    """Make networks, which are closed after the test; skip it where there are none."""
    made: list[Network] = []

    def make(num_hosts: int, **settings: float) -> Network:
        try:
            made.append(Network(num_hosts, **settings))
        except NamespaceError as error:
            pytest.skip(str(error))
        return made[-1]

    yield make
    for each in made:
        each.close()
