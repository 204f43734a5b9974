from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.resilience.agent.conftest import run
from tests.resilience.agent.runs import Run
from tests.shared import Shared

__all__ = ["protect", "run"]

FOLDER = Path(__file__).parent
NUM_RANKS = 4

Protect = Callable[..., "Ended"]


class Ended:
    """What the ranks of a program ended with, and what they had in each step."""

    def __init__(self, out: Path) -> None:
        self.folder = out
        self.ends = {
            rank: json.loads(path.read_text())
            for rank in range(NUM_RANKS)
            if (path := out / f"end-{rank}.json").exists()
        }
        self.fired = sorted(each.name for each in out.glob("fired-*"))
        self.saved = {each.name for each in out.glob("saved-*")}
        self.checkpoints = sorted(each.name for each in out.glob("trained/*"))
        self.calls = [
            path.read_text().splitlines() if path.exists() else []
            for path in (out / f"calls-{rank}" for rank in range(NUM_RANKS))
        ]
        self.steps: dict[tuple[int, int], set[str]] = {}
        for rank in range(NUM_RANKS):
            path = out / f"steps-{rank}"
            for line in path.read_text().splitlines() if path.exists() else ():
                step, values = json.loads(line)
                self.steps.setdefault((rank, step), set()).add(json.dumps(values))

    def assert_same(self, other: Ended) -> None:
        """Fail where bits differ: of the state, or of values in a step that another run had."""
        assert len(self.ends) == NUM_RANKS
        assert self.ends == other.ends
        assert self.saved == other.saved
        # A rank that died after its update has no values of that step.
        assert {place: self.steps[place] - other.steps[place] for place in self.steps} == {
            place: set() for place in self.steps
        }


def start(run: Run, name: str, faults: str = "") -> None:
    """Start a program of a scenario's folder on two nodes of two ranks each."""
    for node in ("n0", "n1"):
        run.start(
            node,
            *("--nnodes", "2", "--nproc-per-node", "2"),
            # By default a hang takes longer than a test may.
            *(("--hang-deadline-s", "8") if "stop" in faults else ()),
            program=(str(next(FOLDER.parent.glob(f"*/{name}_program.py"))),),
            warm="imports",
            # Sockets of a loader's workers lie there, whose paths may not be long.
            variables={"FAULTS": faults, "TMPDIR": "/tmp"},
        )


@pytest.fixture
def protect(run: Run, shared: Shared) -> Protect:
    """Return a function that runs a program with faults, and compares it with one without."""

    def undisturbed(name: str, way: str = "") -> Ended:
        def make(folder: Path) -> None:
            first = Run(folder=folder, port=free_ports(1)[0])
            start(first, name)
            assert [first.wait(node) for node in first.agents] == [0, 0], first.show()

        return Ended(shared.make_once(f"protected {name} {way}", make) / "out")

    def protected(name: str, faults: str, way: str = "") -> Ended:
        expected = undisturbed(name, way)
        start(run, name, faults)
        assert [run.wait(node) for node in run.agents] == [0, 0], run.show()
        ended = Ended(run.folder / "out")
        assert len(ended.fired) == len(faults.split()), run.show()
        ended.assert_same(expected)
        run.assert_nothing_left()
        return ended

    protected.undisturbed = undisturbed  # type: ignore[attr-defined]
    return protected
