"""What rendering may cost: no library that it does not need is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launcher.shipped import CLUSTERS

HEAVY = {"torch", "transformers", "numpy", "boto3", "botocore", "kubernetes", "plotly", "rich",
         "asyncio", "recipes_training", "kubernetes_validate"}  # fmt: skip
PROGRAM = """
import json, sys
from launcher.__main__ import main
status = main(sys.argv[1:])
sys.stderr.write(json.dumps([status, sorted({name.partition('.')[0] for name in sys.modules})]))
"""


TINY = "llama/llama3_tiny_pretrain"
LARGE = "recipe=llama/llama3_70b_pretrain_checkpointless"


def run_program(folder: Path, program: str, arguments: Sequence[str]) -> str:
    """Return the last line that a program writes to its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [
    *([LARGE, *words] for words in CLUSTERS.values()),
    ["explain", f"recipe={TINY}", "--all"], ["diff", TINY, TINY, "--origins"], ["plan", LARGE],
], ids=lambda words: words[0] if words[0] != LARGE else "-".join(words[1:]))  # fmt: skip
def test_what_is_rendered_or_told_needs_neither_torch_nor_clients(
    tmp_path: Path, arguments: list[str]
) -> None:
    status, modules = json.loads(run_program(tmp_path, PROGRAM, arguments))
    assert status == 0
    assert HEAVY & set(modules) == set()


@pytest.mark.parametrize("arguments", [
    ["list", "--help"], ["lst"], ["recipe=llama/llama3_tiny_pretrian"], [],
])  # fmt: skip
def test_what_needs_no_recipe_does_not_wait_for_hydra(tmp_path: Path, arguments: list[str]) -> None:
    _, modules = json.loads(run_program(tmp_path, PROGRAM, arguments))
    # Nor for the models of a job.
    assert {"hydra", "omegaconf", "pydantic"} & set(modules) == set()


COUNTED = """
import sys
from hydra._internal.config_loader_impl import ConfigLoaderImpl
load, calls = ConfigLoaderImpl.load_configuration, []
def count(*words, **options):
    calls.append(words)
    return load(*words, **options)
ConfigLoaderImpl.load_configuration = count
from launcher.__main__ import main
status = main(sys.argv[1:])
sys.stderr.write(f"{status} {len(calls)}")
"""
MINE = "# @package _global_\ndefaults:\n  - llama/llama3_tiny_pretrain\n  - _self_\n"


def counted(folder: Path, *arguments: str) -> list[int]:
    """Return the exit status of a command line, and how often it composed."""
    return [int(word) for word in run_program(folder, COUNTED, arguments).split()[-2:]]


def test_one_job_is_composed_once(tmp_path: Path) -> None:
    assert counted(tmp_path, f"recipe={TINY}", "trainer.seed=3") == [0, 1]


@pytest.mark.parametrize("words", [["hydra.verbose=true"], ["--run"], ["-m", "trainer.seed=1,2"]])
def test_hydras_own_entry_hears_what_is_said_to_hydra(tmp_path: Path, words: list[str]) -> None:
    status, count = counted(tmp_path, f"recipe={TINY}", *words)

    assert status == 0
    assert count > 1


def test_sweep_that_a_recipe_asks_for_is_made(tmp_path: Path) -> None:
    sweep = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      trainer.seed: 1,2\n"
    (tmp_path / "mine.yaml").write_text(MINE + sweep)

    status, _ = counted(tmp_path, "recipe=mine.yaml", "run.dir=swept")

    assert status == 0
    seeds = [
        json.loads((tmp_path / f"swept/{number}/job.json").read_text())["trainer"]["seed"]
        for number in (0, 1)
    ]
    assert seeds == [1, 2]
