"""A recipe that was renamed is found by the name that it had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.command import launch, refuse

RECIPE = """\
# @package _global_
defaults:
  - {included}
  - _self_

recipe:
  name: {name}
  version: 1
  schema: 1
  description: A test

trainer:
  max_steps: {steps}
"""


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A team's folder with the recipe ours/new, which was ours/old and ours/oldest before."""
    below = tmp_path / "recipes/ours"
    below.mkdir(parents=True)
    write(tmp_path, "ours/new", "llama/llama3_tiny_pretrain", 30)
    aliases(tmp_path, "ours/oldest: ours/old\nours/old: ours/new\n")
    return tmp_path


def write(team: Path, name: str, included: str, steps: int) -> None:
    text = RECIPE.format(name=name, included=included, steps=steps)
    (team / f"recipes/{name}.yaml").write_text(text)


def aliases(team: Path, text: str) -> None:
    (team / "recipes/_aliases.yaml").write_text(text)


def steps_of(team: Path, *words: str) -> int:
    ended = launch(*words, "run.dir=out", folder=team)
    assert ended.status == 0, ended.err
    return int(json.loads((team / "out/job.json").read_text())["trainer"]["max_steps"])


@pytest.mark.parametrize("old", ["ours/old", "ours/oldest"])
def test_old_name_means_the_recipe_that_has_another_now(team: Path, old: str) -> None:
    ended = launch(f"recipe={old}", "run.dir=out", folder=team)

    assert ended.status == 0
    assert f"note: recipe '{old}' is called 'ours/new' now\n" in ended.err
    assert json.loads((team / "out/job.json").read_text())["recipe"]["name"] == "ours/new"
    listed = launch("list", "ours", folder=team).out
    assert "ours/new" in listed
    assert "old" not in listed


@pytest.mark.parametrize("included", ["ours/old", "/recipe/ours/oldest", "old"])
def test_recipe_that_includes_one_by_an_old_name_goes_on_doing_so(
    team: Path, included: str
) -> None:
    write(team, "ours/child", included, 50)
    text = (team / "recipes/ours/child.yaml").read_text()
    (team / "recipes/ours/child.yaml").write_text(text.partition("\ntrainer:")[0] + "\n")

    assert steps_of(team, "recipe=ours/child") == 30
    told = launch("explain", "recipe=ours/child", "trainer.max_steps", folder=team)
    assert "from recipes/ours/new.yaml, line 13" in told.out


def test_file_that_has_the_old_name_by_now_comes_first(team: Path) -> None:
    write(team, "ours/old", "llama/llama3_tiny_pretrain", 70)

    assert steps_of(team, "recipe=ours/old") == 70
    assert steps_of(team, "recipe=ours/oldest") == 70


def test_versions_from_before_and_after_a_new_name_are_found_by_both(team: Path) -> None:
    (team / "recipes/ours/new.yaml").rename(team / "recipes/ours/old.yaml")
    write(team, "ours/old", "llama/llama3_tiny_pretrain", 30)
    aliases(team, "{}")
    assert launch("check", "--update", "-m", "first", folder=team).status == 0
    (team / "recipes/ours/old.yaml").unlink()
    aliases(team, "ours/old: ours/new")
    write(team, "ours/new", "llama/llama3_tiny_pretrain", 40)
    text = (team / "recipes/ours/new.yaml").read_text()
    (team / "recipes/ours/new.yaml").write_text(text.replace("version: 1", "version: 2"))
    assert launch("check", "--update", "-m", "renamed", folder=team).status == 0

    assert steps_of(team, "recipe=ours/old@1") == 30
    assert steps_of(team, "recipe=ours/old@2") == 40
    assert steps_of(team, "recipe=ours/new@2") == 40
    assert "no version '3' of recipe 'ours/new'; allowed: 2" in refuse(team, "recipe=ours/old@3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ours/old: ours/older\nours/older: ours/old\n",
         "ours/old -> ours/older -> ours/old: a ring of renamed recipes"),
        ("ours/old: ours/old\n", "a ring of renamed recipes"),
        ("ours/old: ours/gone\n", "'ours/old' is 'ours/gone' there, and no recipe has this name"),
        ("- ours/old\n", "allowed: a mapping of old names of recipes to new ones"),
        ("ours/old: 3\n", "allowed: a mapping of old names of recipes to new ones"),
        ("ours/old: [\n", "_aliases.yaml"),
    ],
)  # fmt: skip
def test_aliases_that_lead_nowhere_are_named_with_their_file(
    team: Path, text: str, message: str
) -> None:
    aliases(team, text)
    told = refuse(team, "recipe=ours/old")
    checked = launch("check", folder=team)
    assert checked.status == 1
    for each in (told, checked.err):
        assert message in each
        assert "recipes/_aliases.yaml" in each


def test_check_names_an_old_name_that_a_recipe_has_by_now(team: Path) -> None:
    assert launch("check", "--update", "-m", "first", folder=team).status == 0
    write(team, "ours/old", "llama/llama3_tiny_pretrain", 70)

    assert launch("check", "--update", "-m", "why", folder=team).status == 1
    ended = launch("check", folder=team)

    assert ended.status == 1
    assert ended.err == (
        f"ours/old: {team}/recipes/_aliases.yaml: a recipe has this name by now; remove one of "
        "the two\n"
    )


def test_old_name_can_be_compared(team: Path) -> None:
    ended = launch("diff", "ours/oldest", "llama/llama3_tiny_pretrain", folder=team)

    assert ended.status == 1, ended.err
    assert "trainer.max_steps: 30 -> 200\n" in ended.out
