"""FSDP2 under an older torch: what is undone of a step, and bound again, has other names there."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.recipes_training.workers import ROOT

PYTHON = ROOT / ".venv-torch-older" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON.exists(), reason=f"no {PYTHON}; scripts/install-older-torch.sh makes it"
)
def test_groups_are_bound_again_under_an_older_torch() -> None:
    files = ("test_trainer_contract.py", "torch/test_trainer_copies.py")
    which = ["-k", "torch or come_and_go", *(f"tests/recipes_training/{each}" for each in files)]
    own = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
    variables = {key: value for key, value in os.environ.items() if key not in own}
    ended = subprocess.run(
        [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *which],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "50 passed" in ended.stdout
