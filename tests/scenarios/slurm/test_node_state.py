"""What a real Slurm says of its nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.slurm.jobs import Slurm


def booted_s() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime ")))


def ask(slurm: Slurm, node: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "resilience.agent.slurm_node", node],
        env={**slurm.environment, "TZ": "Asia/Tokyo", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("variables", [{}, {"SLURM_TIME_FORMAT": "relative"}])
def test_node_that_runs_has_booted(slurm: Slurm, variables: dict[str, str]):
    word, seconds = ask(slurm, "n1", **variables).split()

    assert word == "booted"
    assert abs(float(seconds) - booted_s()) < 60


@pytest.mark.parametrize("node", ["nobody", "c1"])
def test_node_that_slurm_does_not_show_has_no_word(slurm: Slurm, node: str):
    """One of a cloud is not shown while it is off, unless Slurm is told to by PrivateData=cloud."""
    assert ask(slurm, node) == ""
