"""The program of docs/lightning.md, as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.resilience.agent.conftest import run
from tests.resilience.agent.runs import Run
from tests.scenarios.pages.killed_worker import run_with_a_kill

__all__ = ["run"]

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "lightning.md").read_text("utf-8")
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DIFF = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()


def test_killed_worker_leaves_the_model_of_a_run_without_an_agent(run: Run) -> None:
    found = list(ROOT.glob(".venv-frameworks/lib/*/site-packages"))
    if not found:
        pytest.skip("scripts/install-frameworks.sh has not run")
    path = f"import sys\n\nsys.path.append({str(found[0])!r})\n"
    alone = run_with_a_kill(run, path + PROGRAM)

    models = [torch.load(each / "model.pt", weights_only=True) for each in (alone, run.folder)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(each, models[1][name]) for name, each in models[0].items())
    run.assert_nothing_left()


def test_program_differs_from_a_plain_one_by_two_lines() -> None:
    lines = PROGRAM.splitlines()
    added = [each[1:] for each in DIFF if each[0] == "+"]
    removed = [each[1:] for each in DIFF if each[0] == "-"]

    assert len(added) == 2
    assert removed == ['    strategy="ddp",']
    assert all(each in lines for each in added)
    assert [each for each in lines if "resilience" in each or "Recovering" in each] == added


def test_page_names_the_version_that_is_tried() -> None:
    source = (ROOT / "resilience" / "frameworks" / "lightning_refusals.py").read_text("utf-8")
    (version,) = re.findall(r'VERSIONS = \("(.*)\.",\)', source)

    assert f"| Lightning of another version than {version} |" in PAGE
