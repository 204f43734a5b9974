"""State that a program's steps change is named where protect was not given it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

import resilience


class Meter:
    """A running mean of a user's own, which is state."""

    def __init__(self) -> None:
        self.totals = {"loss": 0.0}

    def add(self, value: float) -> None:
        self.totals["loss"] += value


Program = Callable[..., None]


def count(run: resilience.Run, losses: list[int]) -> None:
    total = 0
    for number in run.steps(losses, until=6):
        with run.step():
            square = number * number
            total += square


def collect(run: resilience.Run, losses: list[int]) -> None:
    seen: list[int] = []
    for number in run.steps(losses, until=6):
        with run.step():
            seen.append(number)


def measure(run: resilience.Run, losses: list[int]) -> None:
    meter = Meter()
    for number in run.steps(losses, until=6):
        with run.step():
            meter.add(number)


def draw(run: resilience.Run, losses: list[int]) -> None:
    noise = np.random.default_rng(0)
    for _ in run.steps(losses, until=6):
        with run.step():
            noise.random()


def average(run: resilience.Run, losses: list[int]) -> None:
    mean = nn.Linear(2, 1)
    for _ in run.steps(losses, until=6):
        with run.step(), torch.no_grad():
            mean.weight.mul_(0.9)


def plan(run: resilience.Run, losses: list[int]) -> None:
    plateau = ReduceLROnPlateau(run._optimizers[0])
    for number in run.steps(losses, until=6):
        with run.step():
            plateau.step(number)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (count, "total"),
        (collect, "seen"),
        (measure, "meter"),
        (draw, "noise"),
        (average, "mean"),
        (plan, "plateau"),
    ],
)
def test_state_that_was_not_given_is_named_once(
    program: Program, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program(make_run(), [1, 2, 3])
    told = capsys.readouterr().err
    program(make_run(ignore=[name]), [1, 2, 3])

    assert told.startswith(f"protect was not given {name}: a step changes it")
    assert told.count("\n") == 1
    assert capsys.readouterr().err == ""


class Counting(nn.Linear):
    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


def test_attribute_of_a_module_that_a_forward_changes_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Counting(2, 1)
    run = resilience.protect(model, SGD(model.parameters(), lr=0.1))
    for _ in run.steps([1], until=6):
        with run.step():
            model(torch.ones(1, 2)).sum().backward()

    assert "protect was not given calls of a Counting: a step" in capsys.readouterr().err


def test_objects_of_another_environments_packages_are_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment may take packages from a folder that is not its own."""
    folder = tmp_path / "other" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "cached_package.py").write_text("class Cache:\n    hits = 0\n")
    monkeypatch.syspath_prepend(folder)
    cache = importlib.import_module("cached_package").Cache()
    run = make_run()
    for _ in run.steps([1, 2, 3], until=6):
        with run.step():
            cache.hits += 1

    assert capsys.readouterr().err == ""


def test_what_a_step_makes_anew_and_what_was_given_is_not_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run()
    with torch.inference_mode():
        odd = torch.ones(1)  # counts no writes
    model, loader = run.state._modules["model"], torch.utils.data.DataLoader(range(4))  # type: ignore[arg-type, var-annotated]
    for batch in run.steps(loader, until=6):
        with run.step():
            loss = model(batch.float().expand(1, 2)).sum()
            loss.backward()
            found = [loss.item()]
            for each in found:
                each + 1
            run._optimizers[0].step()

    assert odd.is_inference()
    assert capsys.readouterr().err == ""


def make_run(**options: Any) -> resilience.Run:
    model = nn.Linear(2, 1)
    return resilience.protect(model, SGD(model.parameters(), lr=0.1, momentum=0.9), **options)
