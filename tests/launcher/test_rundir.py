"""What a rendering may replace in a folder, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from launcher.errors import RecipeError
from launcher.rundir import EVENTS_FILE, choose_run_dir, write_files, write_run_dir
from tests.launcher.command import launch
from tests.launcher.local_world import prepare
from tests.launcher.shipped import rendered, shipped_job

TINY = "llama/llama3_tiny_pretrain"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_earlier_rendering_of_another_kind_is_removed(tmp_path: Path) -> None:
    (tmp_path / "node-7.sh").write_text("mine")
    write_files(tmp_path, rendered(shipped_job(TINY, "local")))
    assert names(tmp_path) == {"job.json", "node.json", "node-0.sh", "node-1.sh", "node-7.sh"}
    write_files(tmp_path, rendered(shipped_job(TINY, "slurm")))
    assert names(tmp_path) == {"job.json", "node.json", "job.sbatch", "node-7.sh"}


@pytest.mark.parametrize("recipe", ["llama3_tiny_elastic", "llama3_tiny_checkpointless"])
def test_an_earlier_rendering_with_further_nodes_is_replaced(tmp_path: Path, recipe: str) -> None:
    standby = ["resilience.checkpointless.standby_nodes=1"] * ("elastic" not in recipe)
    for _ in range(2):
        write_files(tmp_path, rendered(shipped_job(f"llama/{recipe}", "local", standby)))
    assert "node-2.sh" in names(tmp_path)

    write_files(tmp_path, rendered(shipped_job(TINY, "local")))

    assert "node-2.sh" not in names(tmp_path)


def test_jobs_of_further_nodes_go_with_an_earlier_rendering(tmp_path: Path) -> None:
    write_files(tmp_path, rendered(shipped_job("llama/llama3_tiny_elastic", "job")))
    assert names(tmp_path) == {"job.json", "manifest.yaml", "growth.yaml"}
    for kind in ("hyperpod", "job"):
        write_files(tmp_path, rendered(shipped_job(TINY, kind)))
        assert names(tmp_path) == {"job.json", "manifest.yaml"}
        (tmp_path / "growth.yaml").write_text("mine")
        write_files(tmp_path, rendered(shipped_job(TINY, "slurm")))
        assert (tmp_path / "growth.yaml").read_text() == "mine"
        (tmp_path / "growth.yaml").unlink()


@pytest.mark.parametrize("name", ["manifest.yaml", "job.json"])
def test_a_file_of_somebodys_own_is_neither_replaced_nor_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    (tmp_path / "node-7.sh").write_text("mine")

    with pytest.raises(RecipeError, match=f"holds {name}, which no rendering left there"):
        write_files(tmp_path, rendered(shipped_job(TINY, "hyperpod")))

    assert names(tmp_path) == {name, "node-7.sh"}
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("mark", ["events.jsonl", "events-n0.jsonl", "submitted.json"])
def test_without_a_folder_given_the_next_free_one_is_taken(tmp_path: Path, mark: str) -> None:
    assert choose_run_dir(None, "a", tmp_path) == tmp_path / "runs/a"
    for number in ("a", "a-2"):
        (tmp_path / "runs" / number).mkdir(parents=True)
        (tmp_path / "runs" / number / mark).touch()

    assert choose_run_dir(None, "a", tmp_path) == tmp_path / "runs/a-3"
    with pytest.raises(RecipeError, match="holds a run already"):
        choose_run_dir("runs/a", "a", tmp_path)


def test_of_many_that_want_one_folder_at_once_each_gets_its_own(tmp_path: Path) -> None:
    num_runs = 8
    together = Barrier(num_runs)

    def begin(number: int) -> Path:
        together.wait()
        return write_run_dir(None, "a", tmp_path, {"job.json": str(number)}, EVENTS_FILE)

    with ThreadPoolExecutor(num_runs) as pool:
        folders = list(pool.map(begin, range(num_runs)))

    written = [(folder / "job.json").read_text() for folder in folders]
    assert written == [str(number) for number in range(num_runs)]
    expected = {"a", *(f"a-{number}" for number in range(2, num_runs + 1))}
    assert {folder.name for folder in folders} == expected


def test_of_two_that_are_given_one_folder_at_once_one_is_refused(tmp_path: Path) -> None:
    together = Barrier(2)

    def begin(number: int) -> str:
        together.wait()
        try:
            write_run_dir("out", "a", tmp_path, {"job.json": str(number)}, EVENTS_FILE)
        except RecipeError as error:
            return str(error)
        return "written"

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(begin, range(2)))

    assert said[0].startswith("run.dir 'out' holds a run already")
    assert said[1] == "written"


def test_a_folder_that_is_refused_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("mine")

    with pytest.raises(RecipeError, match="holds job"):
        write_files(tmp_path, {"job.json": "ours"}, EVENTS_FILE)

    assert names(tmp_path) == {"job.json"}


def test_two_runs_that_are_started_at_once_have_a_record_each(tmp_path: Path) -> None:
    """A team's template stands in for the training."""
    prepare(tmp_path, "#!/bin/sh\n: {{ node }}\n")
    command = [sys.executable, "-m", "launcher", f"recipe={TINY}", "action=run"]

    started = [
        subprocess.Popen([*command, f"trainer.seed={seed}"], cwd=tmp_path,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for seed in (1, 2)
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[0] for process in started]

    assert [process.returncode for process in started] == [0, 0], said
    runs = [tmp_path / "runs" / name for name in ("llama3-tiny-pretrain", "llama3-tiny-pretrain-2")]
    seeds = {json.loads((run / "job.json").read_text())["trainer"]["seed"] for run in runs}
    assert seeds == {1, 2}
    assert [(run / EVENTS_FILE).read_text().count('"run_started"') for run in runs] == [1, 1]


def test_a_submission_that_failed_leaves_its_folder_free(tmp_path: Path) -> None:
    for _ in range(2):
        ended = launch(f"recipe={TINY}", "cluster=slurm", "action=submit", "run.dir=out",
                       folder=tmp_path, env={"PATH": str(tmp_path)})  # fmt: skip

        assert (ended.status, ended.err.split(" on ")[0]) == (1, "no program 'sbatch'")
    assert names(tmp_path / "out") == {"job.json", "node.json", "job.sbatch", "recipe.yaml"}
