"""The command `list`: a row for each recipe, a filter, and JSON."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.listing import COLUMNS_MAX, Entry, print_list
from launcher.errors import RecipeError
from tests.launcher.command import launch
from tests.launcher.shipped import RECIPES

TIERED = "llama/llama3_70b_pretrain_tiered"
SETTINGS = """\
# @package _global_
defaults:
  - llama/llama3_tiny_pretrain
  - _self_
recipe: {{name: {name}, version: 3, description: A zebra of our own}}
trainer:
"""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A team's repository: recipes that are sound, that ask for something, that are broken."""
    folder = tmp_path_factory.mktemp("team")
    (folder / ".git").mkdir()
    (folder / "recipes" / "zoo").mkdir(parents=True)
    for name, lines in {
        "sound": "  seed: 5\n",
        "asks": "  seed: 6\nenv: {WHERE: '???', WHO: '???'}\n",
        "breaks_rule": "  global_batch_size: 15\n",
        "no_yaml": "  a: [\n",
    }.items():
        text = SETTINGS.format(name=f"zoo/{name}") + lines
        (folder / "recipes" / "zoo" / f"{name}.yaml").write_text(text)
    return folder


def listed(folder: Path, *arguments: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert print_list(arguments, folder) == 0
    return shown.getvalue()


@pytest.fixture(scope="module")
def table(team: Path) -> list[str]:
    return listed(team).splitlines()


@pytest.fixture(scope="module")
def entries(team: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(listed(team, "--json"))
    assert [entry["name"] for entry in found] == sorted(entry["name"] for entry in found)
    return {entry["name"]: entry for entry in found}


def test_a_piped_list_has_one_line_of_at_most_120_columns_for_each_recipe(
    table: list[str],
) -> None:
    rows = {line.split()[0]: line for line in table[1 : table.index("")]}

    assert {*RECIPES, "zoo/sound", "zoo/asks"} == rows.keys()
    assert max(map(len, table)) <= COLUMNS_MAX
    assert "\x1b" not in "".join(table)
    assert rows["zoo/asks"].split()[1:] == ["3", "llama", "?", "2", "x", "2", "-"]
    for text in ("llama 8.03B", "FSDP2 hybrid, 2 x 64", "16 x 8"):
        assert text in rows["llama/llama3_8b_pretrain"]


def test_what_only_a_user_knows_is_asked_for_below_the_table(table: list[str]) -> None:
    assert f"{TIERED} asks for resilience.tiered.store.url=s3://BUCKET/PREFIX" in table
    assert "zoo/asks asks for env.WHERE=VALUE env.WHO=VALUE" in table


def test_a_broken_recipe_is_told_below_the_table_with_its_whole_message(
    table: list[str], team: Path
) -> None:
    text = " ".join(" ".join(table[table.index("") :]).split())

    assert f"zoo/no_yaml cannot be used: {team}/recipes/zoo/no_yaml.yaml, line 8" in text
    assert (
        "zoo/breaks_rule cannot be used: trainer.global_batch_size 15 is no multiple of "
        "trainer.micro_batch_size 4 in recipe 'zoo/breaks_rule'" in text
    )


@pytest.mark.parametrize(("word", "names"), [
    ("ZEBRA", {"zoo/asks", "zoo/sound"}),
    ("zoo/", {"zoo/asks", "zoo/breaks_rule", "zoo/no_yaml", "zoo/sound"}),
    ("70.6b", {"llama/llama3_70b_pretrain", "llama/llama3_70b_pretrain_checkpointless", TIERED}),
    ("FSDP2", {"llama/llama3_8b_pretrain", "gpt_oss/gpt_oss_tiny_checkpointless",
               "script/torch_fsdp2"}),
    ("mmap", {"llama/llama3_tiny_checkpointless_mmap", "llama/llama3_tiny_everything"}),
])  # fmt: skip
def test_a_word_keeps_the_recipes_that_have_it(
    entries: dict[str, dict[str, Any]], word: str, names: set[str]
) -> None:
    assert {name for name, each in entries.items() if Entry(**each).has(word)} == names


def test_a_word_that_no_recipe_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^no recipe matches qqq; `list` shows them all$"):
        print_list(["qqq"], tmp_path)


def test_json_says_of_a_recipe_what_it_trains_and_asks_for(
    entries: dict[str, dict[str, Any]],
) -> None:
    assert entries[TIERED] == {
        "name": TIERED,
        "version": 2,
        "description": "Llama 3 70B from random weights, with checkpoints in memory and in S3",
        "architecture": "llama",
        "num_parameters": 70553706496,
        "method": "Megatron TP8 PP4 DP4",
        "num_nodes": 16,
        "num_devices": 8,
        "features": ["checkpointless", "tiered"],
        "asks_for": ["resilience.tiered.store.url"],
        "error": None,
    }
    assert entries["zoo/asks"]["asks_for"] == ["env.WHERE", "env.WHO"]
    assert entries["zoo/sound"]["asks_for"] == []
    assert entries["zoo/breaks_rule"]["error"].startswith("trainer.global_batch_size 15")


def test_a_list_is_printed_by_the_command(team: Path) -> None:
    """From a subfolder of the repository, with status 0 though recipes are broken."""
    (team / "deep").mkdir()

    ended = launch("list", "zoo", folder=team / "deep")

    assert ended.status == 0, ended.err
    assert [line.split()[0] for line in ended.out.splitlines()[1:3]] == ["zoo/asks", "zoo/sound"]
    assert "zoo/no_yaml cannot be used:" in ended.out
