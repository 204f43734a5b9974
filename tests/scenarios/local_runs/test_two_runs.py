"""Two runs that are started at one moment and may have folder, name and namespace in common.

They share a machine, and a store that is a folder. No byte of the one gets into the other: either
both have the losses of a run that was alone, or one of them is told why it may not begin.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launcher.command import TIMEOUT_S, launch
from tests.launcher.local_world import end_all
from tests.launcher.real_runs import SMALL, steps

NUM_STEPS = 8
_LIMIT_S = 3 * TIMEOUT_S


@dataclass(frozen=True)
class Pair:
    """What two runs have in common."""

    folder: bool
    name: bool
    namespace: bool

    def __str__(self) -> str:
        shared = [key for key, value in vars(self).items() if value]
        return "+".join(shared) or "nothing"


PAIRS = [Pair(*each) for each in itertools.product((False, True), repeat=3)]


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    yield
    end_all(tmp_path)
    for run in (tmp_path / "runs").glob("*"):
        launch("clean", str(run), folder=tmp_path)


def words(pair: Pair, number: int, lr: float) -> list[str]:
    """Return what starts one of the two, which learns at a rate of its own."""
    return [
        *SMALL,
        f"trainer.max_steps={NUM_STEPS}",
        f"trainer.optimizer.lr={lr}",
        "resilience/tiered=folder",
        "resilience.tiered.ram.every_n_steps=2",
        "resilience.tiered.store.every_n_steps=2",
        "resilience.tiered.store.keep=null",
        "resilience.tiered.store.url=folder:${oc.env:PWD}/store",
        f"run.name={'both' if pair.name else f'run-{number}'}",
        *([f"run.dir=runs/{'both' if pair.folder else number}"] if pair.folder else []),
        *([f"resilience.tiered.namespace={'shared' if pair.namespace else f'own-{number}'}"]),
    ]


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    (folder / "store").mkdir(exist_ok=True)
    told = [each.replace("${oc.env:PWD}", str(folder)) for each in arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", *told],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    return [each["loss"] for each in steps(run)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[float, list[float]]:
    """The losses at each of the two rates."""
    found = {}
    for lr in (0.003, 0.001):
        folder = tmp_path_factory.mktemp("alone")
        process = start(folder, words(Pair(folder=False, name=False, namespace=False), 0, lr))
        said = process.communicate(timeout=_LIMIT_S)[0]
        assert process.returncode == 0, said
        found[lr] = losses(folder / "runs" / "run-0")
    assert found[0.003] != found[0.001]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_two_runs_at_once_are_separate_or_one_is_told_why_not(
    tmp_path: Path, pair: Pair, alone: dict[float, list[float]]
) -> None:
    rates = (0.003, 0.001)
    processes = [start(tmp_path, words(pair, number, lr)) for number, lr in enumerate(rates)]
    said = [each.communicate(timeout=_LIMIT_S)[0] for each in processes]

    went = [number for number, each in enumerate(processes) if each.returncode == 0]
    refused = [number for number in range(2) if number not in went]
    assert all("Traceback" not in each for each in said), said
    if pair.folder:
        assert len(went) == 1, said
        assert "runs/both" in said[refused[0]]
    elif pair.namespace:
        assert len(went) == 1, said
        for number in refused:
            assert processes[number].returncode == 2
            assert "the namespace 'shared' of the store" in said[number]
            assert "go on with that run (launcher continue" in said[number]
    else:
        assert len(went) == 2, said
    by_rate = {
        json.loads((run / "job.json").read_text())["trainer"]["optimizer"]["lr"]: run
        for run in (tmp_path / "runs").iterdir()
        if (run / "events.jsonl").exists() and steps(run)
    }
    assert {lr: losses(run) for lr, run in by_rate.items()} == {
        rates[number]: alone[rates[number]] for number in went
    }
    stored = sorted(path.name for path in (tmp_path / "store").iterdir())
    assert stored == (["shared"] if pair.namespace else sorted(f"own-{each}" for each in went))
    for each in (tmp_path / "store").iterdir():
        owners = [owner.name for owner in (each / "owner").iterdir()]
        assert len(owners) == 1
        assert not any(owner.endswith(".wants.json") for owner in owners)
