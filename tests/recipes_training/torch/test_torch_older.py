"""FSDP2 under an older torch: what is undone of a step, and bound again, has other names there."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.recipes_training.workers import ROOT

PYTHON = ROOT / ".venv-torch-older" / "bin" / "python"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"no {PYTHON}; scripts/install-older-torch.sh makes it"
    ),
]


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        pytest.param(
            [
                *("-k", "torch or come_and_go", "tests/recipes_training/test_trainer_contract.py"),
                "tests/recipes_training/torch/test_trainer_copies.py",
            ],
            "50 passed",
            id="groups are bound again",
        ),
        pytest.param(
            ["-k", "without_faults", "tests/scenarios/protection"], "4 passed", id="protected"
        ),
    ],
)
def test_tests_pass_under_an_older_torch(words: list[str], passed: str) -> None:
    own = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST")
    variables = {key: value for key, value in os.environ.items() if key not in own}
    ended = subprocess.run(
        [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout[-4000:]
    assert passed in ended.stdout
