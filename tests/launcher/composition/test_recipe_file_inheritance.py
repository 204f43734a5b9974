"""Recipes that include recipes that include recipes, and that choose their cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.launcher.command import launch, put, refuse
from tests.launcher.shipped import ASKED_FOR, shipped_job

HEAD = "# @package _global_\ndefaults:\n"
TINY = "llama/llama3_tiny_pretrain"


def write_recipe(folder: Path, name: str, defaults: list[str], rest: str = "") -> None:
    path = folder / "recipes" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = "".join(f"  - {entry}\n" for entry in [*defaults, "_self_"])
    path.write_text(f"{HEAD}{entries}recipe: {{name: {name}, description: ours}}\n{rest}")


def write_profile(folder: Path, name: str, kind: str, rest: str = "") -> None:
    put(folder / "conf" / "cluster" / f"{name}.yaml", f"defaults: [{kind}, _self_]\n{rest}")


@pytest.fixture
def team(tmp_path: Path) -> Path:
    """A team's repository with a subfolder to work in."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "work" / "here").mkdir(parents=True)
    return tmp_path


def content_of(team: Path, *arguments: str) -> dict[str, Any]:
    """Return job.json as it is rendered from a subfolder of the team's repository."""
    out = team / "out" / str(len(list((team / "out").iterdir())) if (team / "out").is_dir() else 0)

    ended = launch(*arguments, f"run.dir={out}", folder=team / "work" / "here")

    assert ended.status == 0, ended.err
    return cast("dict[str, Any]", json.loads((out / "job.json").read_text()))


def test_a_recipe_inherits_from_one_that_inherits(team: Path) -> None:
    base = "llama/llama3_70b_pretrain_checkpointless"
    write_recipe(team, "ours/x", [base])

    content = content_of(team, "recipe=ours/x", "cluster=slurm", *ASKED_FOR[base])

    expected = json.loads(shipped_job(base, "slurm").to_json())
    expected["recipe"] |= {"name": "ours/x", "description": "ours"}
    assert content == expected | {"name": "x"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_neighbours_and_parts_are_found_at_every_depth(team: Path, depth: int) -> None:
    """A bare name is a recipe's whole name; where none has it, that of one in the same folder."""
    put(team / "recipes" / "deep" / "er" / "_seed.yaml", "trainer: {seed: 77}\n")
    write_recipe(team, "deep/er/level1", [TINY, "_seed"])
    write_recipe(team, "deep/er/level2", ["level1"], "trainer: {max_steps: 33}\n")
    write_recipe(team, "other/level3", ["deep/er/level2"])
    name = ["deep/er/level1", "deep/er/level2", "other/level3"][depth - 1]

    trainer = content_of(team, f"recipe={name}")["trainer"]

    assert (trainer["seed"], trainer["max_steps"]) == (77, 200 if depth == 1 else 33)


def test_families_are_named_as_groups_at_every_depth(team: Path) -> None:
    write_recipe(team, "ours/c", [f"/recipe/{TINY}@_global_"], "trainer: {seed: 9}\n")
    write_recipe(team, "ours/b", ["ours: c"], "trainer: {max_steps: 8}\n")
    write_recipe(team, "other/a", ["/recipe/ours: [b]"])
    write_recipe(team, "other/deep/up", ["../a"])

    trainer = content_of(team, "recipe=other/deep/up")["trainer"]

    assert (trainer["seed"], trainer["max_steps"]) == (9, 8)


def test_a_feature_that_two_levels_choose_is_that_of_the_outer_one(team: Path) -> None:
    write_recipe(team, "ours/inner", [TINY, "override /resilience/mmap: default"],
                 "resources: {shm_gib: 2}\n")  # fmt: skip
    write_recipe(team, "ours/outer", ["ours/inner", "override /resilience/mmap: null",
                                      "override /trainer: torch"])  # fmt: skip

    inner, outer = (content_of(team, f"recipe=ours/{name}") for name in ("inner", "outer"))

    assert inner["resilience"]["mmap"] is not None
    assert outer["resilience"]["mmap"] is None


def test_a_recipe_chooses_its_cluster_and_the_command_line_wins(team: Path) -> None:
    write_profile(team, "ours", "slurm", "partition: train\n")
    write_recipe(team, "ours/x", [TINY, "override /cluster: ours"])

    own = content_of(team, "recipe=ours/x")["cluster"]
    given = content_of(team, "recipe=ours/x", "cluster=k8s")["cluster"]
    changed = content_of(team, "recipe=ours/x", "cluster.partition=test")["cluster"]

    assert (own["kind"], own["partition"]) == ("slurm", "train")
    assert given["kind"] == "k8s"
    assert changed["partition"] == "test"


def test_an_inheriting_recipe_has_its_parents_cluster_or_its_own(team: Path) -> None:
    write_profile(team, "ours", "slurm", "partition: train\n")
    write_profile(team, "theirs", "k8s", "namespace: theirs\n")
    write_recipe(team, "ours/x", [TINY, "override /cluster: ours"])
    write_recipe(team, "ours/y", ["ours/x"])
    write_recipe(team, "ours/z", ["ours/y", "override /cluster: theirs"])

    inherited, own = (content_of(team, f"recipe=ours/{name}")["cluster"] for name in "yz")

    assert inherited["partition"] == "train"
    assert own["namespace"] == "theirs"


@pytest.mark.parametrize(("text", "keys"), [
    ("cluster: {partition: train, account: llm}\n", "cluster.partition, cluster.account"),
    ("cluster: {}\n", "cluster"),
    ("cluster: slurm\n", "cluster"),
])  # fmt: skip
def test_a_recipe_sets_no_key_of_a_cluster(team: Path, text: str, keys: str) -> None:
    write_recipe(team, "ours/x", [TINY], text)
    write_recipe(team, "ours/y", ["ours/x"])

    for name in ("ours/x", "ours/y", "recipes/ours/x.yaml"):
        ended = launch(f"recipe={name}", "cluster=slurm", folder=team)

        assert ended.status == 2
        assert ended.err.startswith(
            f"{team}/recipes/ours/x.yaml sets {keys}, and a recipe is for every kind of cluster; "
            "write a profile, conf/cluster/ours.yaml"
        )
        assert not (team / "runs").exists()


def test_a_list_and_a_mapping_of_one_key_are_not_merged_without_a_word(team: Path) -> None:
    size = "entry: train.py, folder: /code, num_nodes: 1, num_devices: 1"
    arguments = f"trainer: {{{{{size}, arguments: {{}}}}}}\n"
    write_recipe(team, "lists", ["/trainer: script", "/instance: cpu"], arguments.format("[a]"))
    write_recipe(team, "both", ["lists"], arguments.format("{a: 1}"))

    above = refuse(team, "recipe=both")
    named = refuse(team, "recipe=lists", "trainer.arguments.a=1")
    replaced = launch(
        *("recipe=lists", "+recipe.version=1", "+recipe.schema=1"),
        *("~trainer.arguments", "+trainer.arguments={a: 1}"),
        folder=team,
    )

    assert "recipe/both: a list and a mapping do not merge; give the key in the form " in above
    assert "no entry 'a' of a list, which has no names; give it whole, as KEY=[A,B]" in named
    assert replaced.status == 0, replaced.err
