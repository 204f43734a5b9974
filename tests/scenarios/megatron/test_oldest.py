"""The oldest Megatron-Core that the extra takes trains both models, with faults and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes_training.workers import ROOT

_RUNS = (
    "tests/scenarios/megatron/test_recovery.py::test_a_run_with_faults_has_the_bits_of_one_without"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oldest_version_trains_with_faults(tmp_path: Path) -> None:
    (version,) = re.findall(r'"megatron-core>=([0-9.]+),', (ROOT / "pyproject.toml").read_text())
    package = tmp_path / "package"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={package}"]
    subprocess.run([*pip, f"megatron-core=={version}"], check=True)
    environment = {**os.environ, "PYTHONPATH": f"{package}:{ROOT}"}

    found = subprocess.run(
        [sys.executable, "-c", "from megatron.core import __version__ as it; print(it)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
         *(f"{_RUNS}[{layout}]" for layout in ("tensor", "experts"))],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip

    assert found.stdout.strip() == version
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert "2 passed" in ended.stdout
