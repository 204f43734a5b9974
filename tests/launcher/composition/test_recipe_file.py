"""What may be wrong with a recipe's file: one line that names it, status 2, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.command import launch, put, refuse

TINY = "llama/llama3_tiny_pretrain"


def test_broken_yaml_is_named_by_file_line_and_column(tmp_path: Path) -> None:
    path = put(
        tmp_path / "recipes" / "mine.yaml",
        "# @package _global_\nrecipe:\n  name: mine\n  version: [1\ntrainer: {}\n",
    )

    for name in ("mine", "recipes/mine.yaml"):
        assert f"{path}, line 5, column 8" in refuse(tmp_path, f"recipe={name}")


@pytest.mark.parametrize(
    ("files", "chosen", "chain"),
    [
        ({"a": ["a"]}, "'a'", "a -> a"),
        ({"a": ["b"], "b": ["a"]}, "recipes/a.yaml", "a -> b -> a"),
        ({"a": ["llama/llama3_tiny_pretrain", "b"], "b": ["b"]}, "a", "b -> b"),
        ({"a": ["/recipe: a"]}, "recipes/a.yaml", "a -> a"),
        ({"a": ["recipe: b"], "b": ["/recipe: [a]"]}, "a", "a -> b -> a"),
    ],
)
def test_a_recipe_that_includes_itself_is_named_with_the_ring(
    tmp_path: Path, files: dict[str, list[str]], chosen: str, chain: str
) -> None:
    (tmp_path / "recipes").mkdir()
    for name, included in files.items():
        text = "\n".join(f"  - {other}" for other in included)
        (tmp_path / "recipes" / f"{name}.yaml").write_text(
            f"# @package _global_\ndefaults:\n{text}\nrecipe: {{name: {name}}}\n"
        )

    path = tmp_path / "recipes" / f"{chain[0]}.yaml"
    assert f"recipe includes itself: {chain} ({path})" in refuse(tmp_path, f"recipe={chosen}")


@pytest.mark.parametrize(("text", "message"), [
    ("- one\n- two\n", "{path} is a list; allowed: a mapping"),
    ("one\n", "{path} has no line '# @package _global_'"),
    ("", "{path} is empty; a recipe begins with '# @package _global_'"),
    ("recipe: {name: mine}\n", "{path} has no line '# @package _global_' at its beginning"),
    ("#" * 600 + "\n# @package _global_\nrecipe: {name: mine}\n",
     "{path} has no line '# @package _global_' at its"),
    ("# @package _global_\ndefaults: llama/x\n", "{path}: defaults 'llama/x': allowed: a list"),
    ("# @package _global_\ndefaults:\n  - llama/llama3_tini_pretrain\n",
     ("{path} includes 'llama/llama3_tini_pretrain': no such recipe; closest: "
      "'llama/llama3_tiny_pretrain'")),
    ("# @package _global_\ndefaults:\n  - model: llama3_tiny\n",
     "{path}: 'model' in its defaults; a group is written with a / before its name, as /model\n"),
    ("# @package _global_\ndefaults:\n  - /model: llama3_tini\n",
     "no model 'llama3_tini'; closest: 'llama3_tiny'"),
    ("# @package _global_\ndefaults:\n  - null\n",
     "{path}: None in its defaults; allowed: a recipe's name, or"),
    ("# @package _global_\ndefaults:\n  - llama/llama3_tiny_pretrain\n  - /model: llama3_tiny\n",
     ("{path} chooses /model, which 'llama/llama3_tiny_pretrain' that it includes has chosen; "
      "write `override /model: NAME`\n")),
    ("# @package _global_\nx: !!int y\n", "{path}: "),
    ("# @package _global_\nenv: {HF_TOKEN: abc}\n",
     "{path}: env.HF_TOKEN holds a value (not shown); "),
    ("a: 1\na: 2\n", "{path}, line 2, column 1: found duplicate key a, which line 1"),
    ("trainer: {max_steps: 050}\n",
     "{path}, line 1: YAML reads 050 as an octal number, 40; write 40, or the text in quotes"),
    ("trainer: {activation_checkpointing: yes}\n",
     "{path}, line 1: YAML reads yes as true or false, true; write true, or"),
])  # fmt: skip
def test_a_file_that_is_no_recipe_is_named_with_what_it_lacks(
    tmp_path: Path, text: str, message: str
) -> None:
    path = put(tmp_path / "recipes" / "mine.yaml", text)

    said = refuse(tmp_path, "recipe=mine")
    assert said.startswith(message.format(path=path)), said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("text", "message"), [
    ("defaults:\n  - llama/llama3_tiny_pretrain\n  - override /trainr: torch\n",
     "no group 'trainr' to override; closest: 'trainer'\n"),
    ("defaults:\n  - override /trainer: torch\n  - llama/llama3_tiny_pretrain\n",
     "`override /trainer: torch` stands before a recipe that is included;"),
    ("defaults:\n  - llama/llama3_tiny_pretrain\n  - gpt_oss/gpt_oss_tiny_pretrain\n",
     "model is chosen twice;"),
    ("defaults:\n  - llama/llama3_tiny_pretrain\n  - /cluster: slurm\n",
     ("cluster is chosen twice; write cluster=slurm without a +, and in a recipe's defaults "
      "`override /cluster: slurm`;")),
])  # fmt: skip
def test_what_hydra_says_of_a_recipe_is_said_in_its_terms(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "mine.yaml").write_text(f"# @package _global_\n{text}")

    said = refuse(tmp_path, "recipe=mine.yaml")

    assert said.startswith(message), said
    assert said.endswith("\n  in recipe 'mine'\n")


@pytest.mark.parametrize(("text", "message"), [
    ("kind: slurm\npartition: x\n", "cluster lacks account, qos,"),
    ("partition: x\n",
     ("no value for 'cluster.kind'; choose one with cluster=NAME, or begin the file "
      "conf/cluster/NAME.yaml with one of ours")),
    ("defaults: [slrum, _self_]\n", "no cluster 'slrum'; closest: 'slurm'"),
    ("defaults: [ours, _self_]\n",
     "recipe 'llama/llama3_tiny_pretrain': a file of a group includes itself, or its lists"),
])  # fmt: skip
def test_a_profile_that_is_none_is_told_what_it_begins_with(
    tmp_path: Path, text: str, message: str
) -> None:
    put(tmp_path / "conf" / "cluster" / "ours.yaml", text)

    said = refuse(tmp_path, f"recipe={TINY}", "cluster=ours")

    assert said.startswith(message), said
    # The message, the origin of what it names, and the recipe.
    assert len(said.splitlines()) <= 3


def test_a_part_that_is_given_in_part_is_asked_for_whole(tmp_path: Path) -> None:
    policy = "cluster.run_policy.restart_policy"

    said = refuse(
        tmp_path,
        f"recipe={TINY}", "cluster=k8s", "cluster.image=an/image:1", "cluster.job_kind=hyperpod",
        f"{policy}={{full_job_restarts_max: 2}}",
    )  # fmt: skip

    assert said.startswith(
        f"{policy} lacks eval_period_s, restarts_before_full_job, repeat_offenders_to_avoid_max, "
        "scale_up_snooze_s; give all of its keys\n"
    )


def test_all_that_is_not_set_is_asked_for_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"# @package _global_\ndefaults: [{TINY}, _self_]\nenv: {{A: '???', B: '???'}}\n"
    )

    assert refuse(tmp_path, "recipe=mine.yaml") == (
        "no value for 'env.A'; set it, as env.A=VALUE\n"
        "no value for 'env.B'; set it, as env.B=VALUE\n"
    )


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(
        f"\ufeff# @package _global_\ndefaults: [{TINY}, _self_]\n".encode()
    )

    assert launch("recipe=mine.yaml", folder=tmp_path).status == 0


def test_a_recipe_has_the_name_by_which_it_is_found(tmp_path: Path) -> None:
    text = f"# @package _global_\ndefaults:\n  - {TINY}\n  - _self_\n"
    put(tmp_path / "recipes" / "ours" / "mine.yaml", text)
    (tmp_path / "recipes" / "ours" / "My-Own.yaml").write_text(text)

    said = refuse(tmp_path, "recipe=ours/mine")
    by_command_line = refuse(tmp_path, f"recipe={TINY}", "recipe.name=ours/mine")

    assert said.startswith(
        f"recipe.name '{TINY}' is not the name by which the recipe is found; allowed: 'ours/mine'"
    )
    assert "recipe.name 'ours/mine' is not the name" in by_command_line
    assert "recipe 'ours/My-Own': a recipe's name has a-z, 0-9, _ and / alone; rename" in refuse(
        tmp_path, "recipe=ours/My-Own"
    )


def test_a_ring_of_recipes_that_choose_a_group_ends(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / "recipes" / f"{name}.yaml").write_text(
            f"# @package _global_\ndefaults: [{other}, /model: llama3_tiny, _self_]\n"
        )

    said = refuse(tmp_path, "recipe=a")

    path = tmp_path / "recipes" / "a.yaml"
    assert said.startswith(f"{path} chooses /model, which 'b' that it includes has chosen;")


def test_a_name_leads_out_of_no_folder_of_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "ours").mkdir(parents=True)
    (tmp_path / "outside.yaml").write_text(f"# @package _global_\ndefaults: [{TINY}, _self_]\n")
    for included in ("../../outside", "../outside", "ours/../../outside"):
        (tmp_path / "recipes" / "ours" / "mine.yaml").write_text(
            f"# @package _global_\ndefaults: [{included}, _self_]\n"
        )

        assert f"includes '{included}': no such recipe" in refuse(tmp_path, "recipe=ours/mine")


def test_a_recipe_given_as_a_path_keeps_the_name_inside(tmp_path: Path) -> None:
    text = f"# @package _global_\ndefaults:\n  - {TINY}\n  - _self_\n"
    (tmp_path / "recipes").mkdir()
    for path in (tmp_path / "recipes" / "Draft-2.yaml", tmp_path / "Draft-3.yaml"):
        path.write_text(text)
        ended = launch(f"recipe={path.relative_to(tmp_path)}", folder=tmp_path)

        assert ended.status == 0, ended.err
        assert ended.out.startswith(f"{TINY} version 1,")
