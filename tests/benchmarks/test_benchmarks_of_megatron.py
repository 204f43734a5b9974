"""The benchmarks of Megatron run, and what they measure is the same work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.recipes_training.workers import ROOT

pytestmark = pytest.mark.slow


def measure(*words: str) -> list[str]:
    """Return the rows of a benchmark's table."""
    ended = subprocess.run(
        [sys.executable, "-m", *words, "--force-load"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if line.startswith("| ")][1:]


def test_recovery_keeps_every_step_and_bit() -> None:
    kinds = "--kinds=exception,kill in update"

    rows = measure("benchmarks.recovery", "--trainer=megatron", "--systems=ours", "-n1", kinds)

    assert len(rows) == 2
    for row in rows:
        assert "[1 of 1]" in row
        assert "| 0 | 0 | 0 | yes |" in row


def test_both_copies_of_a_contest_have_the_same_losses() -> None:
    """The benchmark raises where they have not."""
    rows = measure("benchmarks.overhead_megatron", "--pairs=2")

    assert [row.split()[1] for row in rows] == ["tensor", "pipeline", "sharded"]


def test_repair_measures_both_kinds_of_faults_and_the_groups() -> None:
    rows = measure("benchmarks.repair_megatron", "--layers=1", "-n1")

    names = [row.split("|")[1].split()[0].strip(":") for row in rows]
    assert names == ["exception", "kill", "opening", "rebinding", "exception", "kill"]
