"""What a rendering may replace in a folder, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.rundir import choose_run_dir, write_files
from tests.launcher.shipped import rendered, shipped_job

TINY = "llama/llama3_tiny_pretrain"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_earlier_rendering_of_another_kind_is_removed(tmp_path: Path) -> None:
    write_files(tmp_path, rendered(shipped_job(TINY, "local")))
    assert names(tmp_path) == {"job.json", "node-0.sh", "node-1.sh"}

    write_files(tmp_path, rendered(shipped_job(TINY, "slurm")))

    assert names(tmp_path) == {"job.json", "job.sbatch"}


@pytest.mark.parametrize("name", ["manifest.yaml", "job.json"])
def test_a_file_of_somebodys_own_is_neither_replaced_nor_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "node-7.sh").write_text("mine")

    with pytest.raises(RecipeError, match=f"holds {name}, which no rendering left there"):
        write_files(tmp_path, rendered(shipped_job(TINY, "hyperpod")))

    assert names(tmp_path) == {name, "node-7.sh"}
    assert (tmp_path / name).read_text() == "mine"


def test_files_that_no_rendering_has_stay(tmp_path: Path) -> None:
    (tmp_path / "node-7.sh").write_text("mine")
    write_files(tmp_path, rendered(shipped_job(TINY, "local")))

    write_files(tmp_path, rendered(shipped_job(TINY, "slurm")))

    assert names(tmp_path) == {"job.json", "job.sbatch", "node-7.sh"}


@pytest.mark.parametrize("mark", ["events.jsonl", "submitted.json"])
def test_without_a_folder_given_the_next_free_one_is_taken(tmp_path: Path, mark: str) -> None:
    assert choose_run_dir(None, "a", tmp_path) == tmp_path / "runs/a"
    for number in ("a", "a-2"):
        (tmp_path / "runs" / number).mkdir(parents=True)
        (tmp_path / "runs" / number / mark).touch()

    assert choose_run_dir(None, "a", tmp_path) == tmp_path / "runs/a-3"
    with pytest.raises(RecipeError, match="holds a run already"):
        choose_run_dir("runs/a", "a", tmp_path)
