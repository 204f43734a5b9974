"""Every shipped recipe makes a script that shells, shellcheck and a real sbatch accept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.clusters.slurm import JOB_SCRIPT
from tests.launcher.shipped import RECIPES, rendered, shipped_job
from tests.scenarios.slurm.jobs import Slurm

SHELLCHECK = Path(sys.executable).parent / "shellcheck"


@pytest.fixture
def script(recipe: str, tmp_path: Path) -> Path:
    path = tmp_path / JOB_SCRIPT
    path.write_text(rendered(shipped_job(recipe, "slurm"))[JOB_SCRIPT])
    return path


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_as_shipped_would_start_on_a_cluster_of_its_size(slurm: Slurm, script: Path):
    """Only the partition is chosen, on sbatch's command line: one has as many nodes as it takes."""
    done = slurm.run("sbatch", "--test-only", "--partition=large", str(script))

    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


@pytest.mark.parametrize("recipe", ["llama/llama3_70b_pretrain_checkpointless"])
def test_recipe_that_the_cluster_is_too_small_for_is_refused(slurm: Slurm, script: Path):
    done = slurm.run("sbatch", "--test-only", "--partition=main", str(script))

    assert done.returncode == 1
    assert "Requested node configuration is not available" in done.stderr


def test_scripts_of_recipes_are_sound_shell(tmp_path: Path):
    scripts = [tmp_path / recipe.replace("/", "-") for recipe in RECIPES]
    for path, recipe in zip(scripts, RECIPES, strict=True):
        path.write_text(rendered(shipped_job(recipe, "slurm"))[JOB_SCRIPT])
        assert subprocess.run(["bash", "-n", path]).returncode == 0

    done = subprocess.run(
        [SHELLCHECK, "--severity=style", *scripts], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
