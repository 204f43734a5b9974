"""The program of docs/huggingface.md, as it stands."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from resilience.frameworks.huggingface import VERSIONS, RecoveryMixin
from tests.resilience.agent.conftest import run
from tests.resilience.agent.runs import Run

__all__ = ["run"]

PAGE = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text("utf-8")
PROGRAM = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
DIFF = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)[0].splitlines()


def read_model(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_killed_worker_leaves_the_model_of_a_run_without_an_agent(run: Run, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    for folder in (alone, tmp_path):
        (folder / "train.py").write_text(PROGRAM)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    command = [sys.executable, "-m", *torchrun]
    subprocess.run(command, cwd=alone, check=True, timeout=200, capture_output=True)

    program = (str(tmp_path / "train.py"),)
    options = ("--nproc-per-node", "2")
    run.start("n0", *options, program=program, warm="imports", variables={"TMPDIR": "/tmp"})
    run.wait_for(lambda event: event.event == "step")
    os.kill(run.children("n0")[2], signal.SIGKILL)

    assert run.wait() == 0, run.show()
    assert "worker_replaced" in {each.event for each in run.events()}
    assert read_model(tmp_path) == read_model(alone)
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


@pytest.mark.parametrize("name", re.findall(r"`((?:SFT|DPO)?Trainer)`", PAGE))
def test_class_of_the_page_is_a_recovering_one(name: str) -> None:
    module = importlib.import_module("resilience.frameworks.huggingface")
    if name != "Trainer":
        pytest.importorskip("trl")

    assert issubclass(getattr(module, name), RecoveryMixin)
