"""`init` writes what a team's repository begins with, and hides nothing that is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launcher.command import launch, refuse


def test_a_profile_that_init_writes_is_one_of_its_kind(tmp_path: Path) -> None:
    """And no file that is there is written over, nor one that leads elsewhere."""
    (tmp_path / "recipes").symlink_to("elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".pre-commit-config.yaml").write_text("repos: []\n")

    ended = launch("init", "k8s", folder=tmp_path)

    assert (ended.status, ended.err) == (0, "")
    assert (tmp_path / ".pre-commit-config.yaml").read_text() == "repos: []\n"
    rendered = launch("recipe=ours/first", "cluster=ours", folder=tmp_path)
    assert rendered.status == 0, rendered.err
    assert (tmp_path / "runs" / "first" / "manifest.yaml").exists()


@pytest.mark.parametrize("name", ["conf", "recipes"])
def test_init_below_a_folder_with_the_teams_files_is_refused(tmp_path: Path, name: str) -> None:
    """Not where a repository alone is above: a folder of it may hold the team's files."""
    (tmp_path / ".git").mkdir()
    below = tmp_path / "experiments" / "lr"
    below.mkdir(parents=True)
    assert launch("init", folder=below).status == 0
    shutil.rmtree(below)
    below.mkdir()
    (tmp_path / name).mkdir()

    message = refuse(below, "init", "k8s")

    assert f"{tmp_path / name} is your repository's" in message
    assert f"run init in {tmp_path}\n" in message
    assert launch("init", "k8s", folder=tmp_path).status == 0


def test_init_says_for_which_kind_the_profile_is_that_it_leaves(tmp_path: Path) -> None:
    assert launch("init", "slurm", folder=tmp_path).status == 0

    ended = launch("init", "k8s", folder=tmp_path)

    assert "left as it is: conf/cluster/ours.yaml, for slurm\n" in ended.out
    assert "left as it is: recipes/ours/first.yaml\n" in ended.out


def test_init_in_a_folder_that_refuses_ends_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "conf").write_text("a file")

    ended = launch("init", folder=tmp_path)

    assert (ended.status, ended.out) == (1, "")
    assert "conf" in ended.err
    assert "Traceback" not in ended.err


def test_a_recipe_that_init_writes_of_a_script_starts_it(tmp_path: Path) -> None:
    """Named from the folder that init is called in; a recipe that is there is left."""
    folder = tmp_path / "My Lab"
    script = folder / "src" / "train-it.py"
    script.parent.mkdir(parents=True)
    script.write_text("print()\n")

    ended = launch("init", "--script", "src/train-it.py", folder=folder)

    assert ended.out.startswith("wrote recipes/my_lab/train_it.yaml\n"), ended
    rendered = launch("recipe=my_lab/train_it", folder=folder)
    assert rendered.status == 0, rendered.err
    job = json.loads((folder / "runs/train-it/job.json").read_text())
    assert (job["trainer"]["entry"], job["trainer"]["folder"]) == ("src/train-it.py", str(folder))
    again = launch("init", "--script", "src/train-it.py", folder=folder)
    assert again.out.startswith("left as it is: recipes/my_lab/train_it.yaml\n")
    (folder / "train_it.py").touch()
    said = refuse(folder, "init", "--script", "train_it.py")
    assert "recipes/my_lab/train_it.yaml is there, with another entry" in said


@pytest.mark.parametrize(
    "words", [("nope.py",), (), ("a.py", "b.py"), ("recipes",), ("tr ain.py",), ("a.txt",)]
)
def test_init_of_no_script_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Nor of one that no recipe could start: nothing is written of it."""
    for name in ("tr ain.py", "a.txt"):
        (tmp_path / name).touch()
    assert "init --script" in refuse(tmp_path, "init", "--script", *words)
    assert not (tmp_path / "recipes").exists()
