"""What docs/scripts.md has a person type and write, typed and written as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import resilience
from launcher.job.workload import ScriptTrainer
from resilience import script
from tests.launcher.command import launch, put
from tests.launcher.script_job import script_job
from tests.scenarios.pages.test_readme import ROOT, _blocks, _type

PAGE = (ROOT / "docs" / "scripts.md").read_text("utf-8")
PROGRAM = """
import os, resilience, sys
for step in range(1, 4):
    resilience.log(step, 1 / step)
print(sys.argv[1:], os.environ["LAUNCHER_RUN_DIR"])
"""


def test_first_run_is_as_the_page_says(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    put(folder / "train.py", PROGRAM)

    done = _type(_blocks(PAGE, "sh")[0], folder)

    assert done.returncode == 0, done.stderr
    assert "lab/train version 1: finished\n  steps       3\n" in done.stdout


def test_wrapper_of_the_page_names_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (80, 120):
        put(tmp_path / f"checkpoints/checkpoint-{step}/trainer_state.json", "")
    (wrapper,) = (each for each in _blocks(PAGE, "sh") if "exec python" in each)
    done = _type(f"LAUNCHER_RUN_DIR=.\n{wrapper.replace('exec python', 'echo')}", tmp_path)
    assert done.stdout == "--resume_from_checkpoint ./checkpoints/checkpoint-120\n"


@pytest.mark.parametrize("block", _blocks(PAGE, "yaml"))
def test_each_part_of_a_recipe_is_taken(block: str) -> None:
    trainer = script_job(**yaml.safe_load(block)["trainer"]).trainer

    assert isinstance(trainer, ScriptTrainer)


def test_recipes_and_programs_of_the_page_are_there() -> None:
    listed = launch("list", "script", folder=ROOT).out

    assert {*re.findall(r"^\| `(script/\w+)` \|", PAGE, re.MULTILINE)} == {
        word for word in listed.split() if word.startswith("script/")
    }


def test_the_line_of_the_page_prints_steps_without_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_say", None)
    (program,) = _blocks(PAGE, "python")

    exec(compile(program, "docs/scripts.md", "exec"), {})

    assert capsys.readouterr().out.splitlines()[-1] == "step 100, loss 0.02, lr 0.0003"


def test_public_names_are_those_of_the_page() -> None:
    names = PAGE.partition("## The package")[2]

    assert set(re.findall(r"^\| `(\w+)", names, re.MULTILINE)) == set(resilience.__all__)
