"""What rendering may cost: no library that it does not need is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.shipped import CLUSTERS

HEAVY = {"torch", "transformers", "numpy", "boto3", "botocore", "kubernetes", "plotly", "rich",
         "asyncio", "training", "kubernetes_validate"}  # fmt: skip
PROGRAM = """
import json, sys
from launcher.__main__ import main
status = main(sys.argv[1:])
sys.stderr.write(json.dumps([status, sorted({name.partition('.')[0] for name in sys.modules})]))
"""


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_rendering_imports_neither_torch_nor_clients(tmp_path: Path, cluster: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "recipe=llama/llama3_70b_pretrain_checkpointless",
         *CLUSTERS[cluster]],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0
    assert HEAVY & set(modules) == set()


@pytest.mark.parametrize("arguments", [
    ["explain", "recipe=llama/llama3_tiny_pretrain", "--all"],
    ["diff", "llama/llama3_tiny_pretrain", "llama/llama3_tiny_pretrain", "--origins"],
])  # fmt: skip
def test_telling_of_values_imports_neither_torch_nor_clients(
    tmp_path: Path, arguments: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0
    assert HEAVY & set(modules) == set()


@pytest.mark.parametrize("arguments", [
    ["--help"], ["list", "--help"], ["lst"], ["recipe=llama/llama3_tiny_pretrian"],
    [], ["llama/llama3_tiny_pretrain"],
])  # fmt: skip
def test_what_needs_no_recipe_does_not_wait_for_hydra(tmp_path: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    _, modules = json.loads(done.stderr.splitlines()[-1])
    assert {"hydra", "omegaconf"} & set(modules) == set()
