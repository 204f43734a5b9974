from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.recipes_training.workers import call


@dataclass(frozen=True)
class Outcome:
    """What the ranks of a node came to."""

    folder: Path
    statuses: list[int]
    text: str
    """What they printed."""

    def word(self, rank: int) -> Any:
        return json.loads((self.folder / f"word-{rank}.json").read_text())


RunNode = Callable[..., Outcome]


@pytest.fixture
def run_node(tmp_path: Path) -> RunNode:
    """Run `tests.resilience.state.programs:<program>` in every rank of a node."""

    def run(
        program: str,
        *,
        num_ranks: int = 2,
        way: str = "buffer",
        statuses: list[int] | None = None,
    ) -> Outcome:
        request = {"folder": str(tmp_path), "num_ranks": num_ranks, "way": way}
        log = tmp_path / "worker-0.log"
        target = f"tests.resilience.state.programs:{program}"
        status = call(target, [json.dumps(request)], {}, log).wait()
        text = log.read_text()
        assert status == 0, text
        outcome = Outcome(tmp_path, json.loads((tmp_path / "statuses.json").read_text()), text)
        assert outcome.statuses == (statuses or [0] * num_ranks), text
        return outcome

    return run
