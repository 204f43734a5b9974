"""Which recipe a command line means, and where a team's own files are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.composition.choice import choose_recipe, list_recipes
from launcher.errors import RecipeError
from launcher.paths import find_folders, shipped_folder
from tests.launcher.command import launch, put

OWN = """\
# @package _global_
defaults:
  - llama/llama3_tiny_pretrain
  - _self_
recipe:
  name: ours
  description: a team's own
trainer:
  max_steps: 77
"""


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A team's repository: a recipe, a cluster file and a template of their own."""
    (tmp_path / ".git").mkdir()
    put(tmp_path / "recipes" / "ours.yaml", OWN)
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "big.yaml").write_text(
        "defaults:\n  - slurm\n  - _self_\npartition: big\nexclusive: false\n"
    )
    (tmp_path / "deep" / "er").mkdir(parents=True)
    return tmp_path


def test_a_teams_recipe_is_found_from_any_folder_of_its_repository(team: Path) -> None:
    for folder in (team, team / "deep", team / "deep" / "er"):
        ended = launch("show", "ours", "cluster=big", folder=folder)

        assert ended.status == 0, ended.err
        assert "max_steps: 77" in ended.out
        assert "partition: big" in ended.out


def test_folders_above_the_repository_are_not_searched(team: Path) -> None:
    inner = team / "deep"
    (inner / ".git").mkdir()

    assert team / "recipes" not in find_folders(inner).recipes


def test_without_a_repository_only_the_folder_itself_is_searched(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "sub").mkdir()

    assert find_folders(tmp_path / "sub").recipes == (shipped_folder() / "recipes",)
    assert find_folders(tmp_path).recipes[0] == tmp_path / "recipes"


def test_a_teams_template_replaces_ours_of_the_same_name(team: Path) -> None:
    (team / "templates" / "slurm").mkdir(parents=True)
    (team / "templates" / "slurm" / "job.sbatch.j2").write_text(
        "#!/bin/bash\n#SBATCH --ignore-pbs\n#SBATCH --job-name={{ job.name | sh }}\necho ours\n"
    )

    ended = launch("recipe=ours", "cluster=slurm", "run.dir=out", folder=team)

    assert ended.status == 0, ended.err
    assert (team / "out" / "job.sbatch").read_text().endswith("echo ours\n")


def test_a_recipe_by_path_includes_its_neighbours_and_ours(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "part.yaml").write_text(OWN)
    (folder / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - part\n  - _self_\nrecipe:\n  name: mine\n"
    )

    ended = launch("recipe=elsewhere/mine.yaml", "run.dir=out", "cluster=slurm", folder=tmp_path)

    assert ended.status == 0, ended.err
    assert '"max_steps": 77' in (tmp_path / "out" / "job.json").read_text()


def test_hydras_own_options_print_and_write_nothing(tmp_path: Path) -> None:
    recipe = "recipe=llama/llama3_70b_pretrain_checkpointless"

    config = launch("--cfg", "job", recipe, folder=tmp_path)
    tree = launch(recipe, "--info", "defaults-tree", folder=tmp_path)

    assert config.status == tree.status == 0
    assert "tensor_parallel: 8" in config.out
    assert "recipe/llama/llama3_70b_pretrain" in tree.out
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_renders_each_job_into_a_folder_and_name_of_its_own(tmp_path: Path) -> None:
    ended = launch("--multirun", "recipe=llama/llama3_tiny_pretrain", "cluster=slurm",
                   "trainer.optimizer.lr=0.1,0.01", "hydra.sweep.dir=sweep",
                   folder=tmp_path)  # fmt: skip

    assert ended.status == 0, ended.err
    jobs = [(tmp_path / "sweep" / number / "job.json").read_text() for number in "01"]
    assert '"lr": 0.1,' in jobs[0]
    assert '"lr": 0.01,' in jobs[1]
    assert '"name": "llama3-tiny-pretrain-0"' in jobs[0]
    assert '"name": "llama3-tiny-pretrain-1"' in jobs[1]


@pytest.mark.parametrize(("words", "message"), [
    (["recipe=llama/llama3_tiny_pretrain,gpt_oss/gpt_oss_tini_pretrain"],
     "closest: 'gpt_oss/gpt_oss_tiny_pretrain'"),
    (["recipe=llama/llama3_tiny_pretrain", "trainer.num_nodes=2,3"],
     "trainer.global_batch_size 16 has 4 micro batches"),
    (["recipe=llama/llama3_tiny_pretrain", "cluster=local,slrum"],
     "no cluster 'slrum'; closest: 'slurm'"),
])  # fmt: skip
def test_a_refused_job_of_a_sweep_gives_its_message_and_status_2(
    tmp_path: Path, words: list[str], message: str
) -> None:
    ended = launch("-m", *words, "hydra.sweep.dir=sweep", folder=tmp_path)
    assert ended.status == 2
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_parts_whose_name_begins_with_an_underscore_are_no_recipes(tmp_path: Path) -> None:
    (tmp_path / "_parts").mkdir()
    (tmp_path / "_parts" / "x.yaml").touch()
    (tmp_path / "_y.yaml").touch()
    (tmp_path / "z.yaml").touch()

    assert list_recipes([tmp_path]) == ["z"]


def test_other_sweeps_of_hydra_are_left_to_hydra(tmp_path: Path) -> None:
    choice = choose_recipe(["-m", "recipe=glob(llama/*)"], [tmp_path], tmp_path)

    assert choice.arguments == ("-m", "recipe=glob(llama/*)")


def test_a_name_with_the_suffix_of_a_file_is_told_without_it(tmp_path: Path) -> None:
    name = "llama/llama3_tiny_pretrain"

    with pytest.raises(RecipeError, match=rf"the recipe of this name is recipe={name}$"):
        choose_recipe([f"recipe={name}.yaml"], find_folders(tmp_path).recipes, tmp_path)
