"""The program of docs/huggingface.md, as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from resilience.frameworks.huggingface import VERSIONS
from tests.resilience.agent.conftest import run
from tests.resilience.agent.runs import Run
from tests.scenarios.pages.killed_worker import run_with_a_kill

__all__ = ["run"]

PAGE = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text("utf-8")
PROGRAM, LOOP = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DIFF = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()


def read_model(folder: Path) -> bytes:
    weights = folder / "model" / "model.safetensors"
    if weights.exists():
        return weights.read_bytes()
    found = torch.load(folder / "model.pt", weights_only=True)
    return b"".join(each.numpy().tobytes() for each in found.values())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PROGRAM, id="trainer"),
        pytest.param(LOOP, id="accelerate", marks=pytest.mark.slow),
    ],
)
def test_killed_worker_leaves_the_model_of_a_run_without_an_agent(run: Run, text: str) -> None:
    alone = run_with_a_kill(run, text)

    assert read_model(run.folder) == read_model(alone)
    run.assert_nothing_left()


def test_program_differs_from_a_plain_one_by_the_line_of_its_import() -> None:
    changed = [each for each in DIFF if each[1:].strip()]
    assert [each[0] for each in changed] == ["-", "+", "+"]
    assert all(each[1:] in PROGRAM.splitlines() for each in changed if each[0] == "+")
    plain = "\n".join(each[1:] for each in changed if each[0] == "-")
    assert "Trainer" in plain.replace("TrainingArguments", "")


def test_page_names_the_version_that_is_tried() -> None:
    assert transformers.__version__.startswith(VERSIONS)
    assert "another version than " + " and ".join(each.rstrip(".") for each in VERSIONS) in PAGE
