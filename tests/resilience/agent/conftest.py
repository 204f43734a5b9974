from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.resilience.agent.places import Place, make_place
from tests.resilience.agent.runs import Run, run_undisturbed
from tests.shared import Shared

Undisturbed = Callable[[int, int], str]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    each = Run(folder=tmp_path, port=free_ports(1)[0])
    yield each
    each.end()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    each = make_place(tmp_path)
    yield each
    each.end()


@pytest.fixture(scope="session")
def undisturbed(shared: Shared) -> Undisturbed:
    """Return the digest that a run without faults ends with, by its ranks and steps."""

    def digest(num_ranks: int, steps: int) -> str:
        folder = shared.make_once(
            f"agent {num_ranks} {steps}", lambda made: run_undisturbed(made, num_ranks, steps)
        )
        return (folder / "digest").read_text()

    return digest
