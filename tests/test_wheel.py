"""What a person gets who installs the package instead of cloning the project."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launcher.shipped import ASKED_FOR, CLUSTERS

ROOT = Path(__file__).parents[1]
RECIPE = "llama/llama3_70b_pretrain_checkpointless"


def run(*command: str, folder: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **env},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_lists_and_renders_the_same_bytes_as_a_checkout(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    run("-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT), folder=tmp_path)
    wheel = next(tmp_path.glob("*.whl"))
    run("-m", "pip", "install", "-q", "--no-deps", "--target", str(installed), str(wheel),
        folder=tmp_path)  # fmt: skip
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = {"PYTHONPATH": str(installed)}

    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
        (info,) = (name for name in names if name.endswith(".dist-info"))
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert names == {"launcher", "resilience", "recipes_training", info}
    origin = run("-c", "import launcher; print(launcher.__file__)", folder=elsewhere, **path)
    listed = run("-m", "launcher", "list", folder=elsewhere, **path)
    words = (*CLUSTERS["job"], *ASKED_FOR[RECIPE], "run.dir=out")
    run("-m", "launcher", f"recipe={RECIPE}", *words, folder=elsewhere, **path)

    assert origin.startswith(str(installed))
    assert RECIPE in listed
    golden = ROOT / "tests" / "golden" / RECIPE / "job"
    for file in golden.iterdir():
        assert (elsewhere / "out" / file.name).read_bytes() == file.read_bytes()
