"""What an extra of the package asks for can be had together, in a fresh environment."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest

from tests.recipes_training.workers import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("extras", "constraints"),
    [("train,megatron", None), ("aws", None), ("nemo", "constraints/nemo.txt")],
)
def test_an_extra_resolves(tmp_path: Path, extras: str, constraints: str | None) -> None:
    """pip finds versions of all; it installs nothing."""
    venv.create(tmp_path / "fresh", with_pip=True)
    held = [] if constraints is None else ["--constraint", constraints]

    ended = subprocess.run(
        [tmp_path / "fresh/bin/pip", "install", "--dry-run", *held, f"{ROOT}[{extras}]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "Would install" in ended.stdout
