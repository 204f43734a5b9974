"""`explain` names the file, line and override of every key, and what they replaced."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from launcher.errors import RecipeError
from launcher.provenance.explained import Explainer, explained_data, explained_lines
from launcher.provenance.fold import FileLayer, Origin, fold
from launcher.provenance.lines import Lines
from tests.launcher.command import launch, refuse
from tests.launcher.commands.recipes.marked import copy_shipped, explain, wrong_origins, yaml_lines
from tests.launcher.shipped import CLUSTERS, RECIPES

TINY = "llama/llama3_tiny_pretrain"
CHECKPOINTLESS = "llama/llama3_70b_pretrain_checkpointless"
CASES = [(recipe, list(CLUSTERS)[number % len(CLUSTERS)]) for number, recipe in enumerate(RECIPES)]


@pytest.mark.parametrize(("recipe", "cluster"), CASES)
def test_the_origin_of_every_key_of_a_shipped_recipe_is_the_right_one(
    tmp_path: Path, recipe: str, cluster: str
) -> None:
    copy_shipped(tmp_path)
    overrides = [*CLUSTERS[cluster], "trainer.num_nodes=4", "+env.NCCL_DEBUG=INFO"]
    found = explain(recipe, overrides, tmp_path)
    assert all(told.origin for each in found for told in (*each.replaced, *each.refers_to))

    assert wrong_origins(found, recipe, overrides, tmp_path) == {}


# Keys that llama3_tiny_pretrain has, whatever a team does to it.
_SET = st.sampled_from([
    "trainer.num_nodes", "trainer.optimizer.lr", "trainer.seed", "data.seq_length", "env.A",
    "env.B", "resources.shm_gib", "model.num_layers", "resilience.tiered.ram.keep", "time_limit",
    "resilience.checkpointless", "instance.num_devices", "run.name",
])  # fmt: skip
_VALUE = st.one_of(
    st.integers(0, 9), st.booleans(), st.none(), st.floats(0, 1, width=16),
    st.sampled_from(["text", "1e-3", "no", "a: b # c", "???", "${trainer.num_nodes}", "${env.A}"]),
)  # fmt: skip
_CONTENT = st.dictionaries(_SET, _VALUE, max_size=5)
_CHOICE = st.sampled_from([
    "/instance: ml.p5.48xlarge", "/model: llama3_8b", "/model: ours", "/trainer: megatron",
    "/resilience/checkpointless: default", "/resilience/tiered: ram_s3", "/cluster: slurm",
])  # fmt: skip
_LEVEL = st.tuples(_CONTENT, st.lists(_CHOICE, max_size=2, unique_by=lambda c: c[:6]))
_OVERRIDE = st.one_of(
    st.tuples(_SET, st.integers(0, 9)).map(lambda pair: f"{pair[0]}={pair[1]}"),
    st.tuples(_SET, st.integers(0, 9)).map(lambda pair: f"++{pair[0]}={pair[1]}"),
    _SET.map(lambda key: f"~{key}"),
    st.sampled_from([
        "+env.C=1", "+env={D: 1, E: 2}", "env={}", "instance=ml.p5en.48xlarge", "model=llama3_8b",
        "model=ours", "resilience/mmap=default", "~resilience/tiered", "resilience.tiered=null",
        "trainer.optimizer={lr: 1, eps: 2}", "cluster=k8s", "~env", "env.A='${run.name}'",
    ]),
)  # fmt: skip


def _nested(content: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in content.items():
        *sections, last = key.split(".")
        node = root
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return root


def _write_team(folder: Path, levels: Sequence[tuple[dict[str, Any], list[str]]]) -> str:
    """Write recipes that each include the one before; returns the name of the last."""
    (folder / "conf" / "model" / "ours.yaml").write_text(
        "defaults:\n  - llama3_tiny\n  - _self_\nnum_layers: 5\nhead_dim: 16\n"
    )
    (folder / "recipes" / "ours").mkdir()
    included = TINY
    for number, (content, choices) in enumerate(levels):
        name = f"ours/level{number}"
        overriding = [f"  - override {choice}" for choice in choices]
        recipe = {"recipe": {"name": name, "version": number + 1}, **_nested(content)}
        lines = ["# @package _global_", "defaults:", f"  - {included}", *overriding, "  - _self_"]
        text = "\n".join([*lines, *yaml_lines(recipe)])
        (folder / "recipes" / f"{name}.yaml").write_text(f"{text}\n")
        included = name
    return included


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_LEVEL, max_size=4), st.lists(_OVERRIDE, max_size=4, unique=True))
def test_origins_are_right_for_random_recipes_at_random_levels_with_random_overrides(
    levels: list[tuple[dict[str, Any], list[str]]], overrides: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_shipped(folder)
        recipe = _write_team(folder, levels)
        try:
            found = explain(recipe, overrides, folder)
        except RecipeError:
            # An override of a key that another has deleted, and the like.
            event("refused by Hydra")
            return

        assert wrong_origins(found, recipe, overrides, folder) == {}


def test_an_override_is_told_with_all_that_it_replaced(tmp_path: Path) -> None:
    ended = launch(
        "explain", f"recipe={CHECKPOINTLESS}", "trainer.num_replicas=4", "trainer.num_replicas",
        folder=tmp_path,
    )  # fmt: skip

    assert (ended.status, ended.err) == (0, "")
    assert ended.out == (
        "trainer.num_replicas: 4\n"
        "  from command line, trainer.num_replicas=4\n"
        f"  replaced 2, from recipes/{CHECKPOINTLESS}.yaml, line 17\n"
        "  replaced 1, from conf/trainer/megatron.yaml, line 15\n"
    )


def test_an_override_of_a_frozen_file_comes_from_that_file(tmp_path: Path) -> None:
    frozen = launch("freeze", f"recipe={TINY}", "trainer.max_steps=9", folder=tmp_path)
    (tmp_path / "short.yaml").write_text(frozen.out)
    words = ("explain", "recipe=short.yaml", "trainer.max_steps")

    ended = launch(*words, folder=tmp_path)
    again = launch(*words, "trainer.max_steps=9", folder=tmp_path)

    line = "from short.yaml (trainer.max_steps=9)\n"
    assert f"trainer.max_steps: 9\n  {line}  replaced 200, " in ended.out
    assert f"  from command line, trainer.max_steps=9\n  replaced 9, {line}" in again.out


def test_a_reference_is_told_with_what_it_refers_to(tmp_path: Path) -> None:
    ended = launch(
        "explain", f"recipe={CHECKPOINTLESS}", "cluster.checkpoint_store_url=s3://b/runs",
        "resilience.tiered.store.url", folder=tmp_path,
    )  # fmt: skip

    assert ended.out == (
        "resilience.tiered.store.url: 's3://b/runs'\n"
        "  from conf/resilience/tiered/_store.yaml, line 8, "
        "as ${oc.select:cluster.checkpoint_store_url,null}\n"
        "  refers to cluster.checkpoint_store_url: 's3://b/runs', "
        "from command line, cluster.checkpoint_store_url=s3://b/runs\n"
        "  replaced resilience.tiered.store: null, from conf/resilience/tiered/_settings.yaml, "
        "line 23\n"
        "  replaced resilience.tiered: null, from conf/launcher.yaml, line 48\n"
    )


def test_a_file_is_told_with_the_override_that_chose_it(tmp_path: Path) -> None:
    ended = launch(
        "explain", f"recipe={TINY}", "model=llama3_8b", "model.num_layers", "model.vocab_size",
        folder=tmp_path,
    )  # fmt: skip

    assert ended.out == (
        "model.vocab_size: 128256\n"
        "  from conf/model/_llama3.yaml, line 2 (model=llama3_8b)\n"
        "model.num_layers: 32\n"
        "  from conf/model/llama3_8b.yaml, line 4 (model=llama3_8b)\n"
    )


def test_without_a_key_those_are_told_that_recipes_and_overrides_have_set(tmp_path: Path) -> None:
    ended = launch("explain", f"recipe={TINY}", "trainer.seed=7", folder=tmp_path)
    everything = launch("explain", f"recipe={TINY}", "--all", folder=tmp_path)

    keys = [line for line in ended.out.splitlines() if not line.startswith(" ")]
    assert "trainer.seed: 7" in keys
    assert "recipe.version: 1" in keys
    assert not any(line.startswith("instance.") for line in keys)
    num_all = sum(not line.startswith(" ") for line in everything.out.splitlines())
    left = num_all - len(keys) + 1
    assert keys[-1] == (
        f"{left} more keys are as their groups have them; --all shows them too, KEY a key or "
        "section"
    )


def test_a_section_stands_for_what_lies_below_it(tmp_path: Path) -> None:
    ended = launch(
        "explain", "recipe=llama/llama3_tiny_checkpointless", "--json", "trainer.optimizer",
        "resilience.faults.injected[1]", folder=tmp_path,
    )  # fmt: skip

    found = json.loads(ended.out)
    assert [each["key"] for each in found] == [
        *(f"resilience.faults.injected[1].{key}" for key in ("kind", "place", "step", "rank")),
        *(f"trainer.optimizer.{key}" for key in (
            "lr", "min_lr", "warmup_steps", "decay_steps", "beta1", "beta2", "eps", "weight_decay",
            "clip_norm",
        )),
    ]  # fmt: skip
    (learning_rate,) = (each for each in found if each["key"] == "trainer.optimizer.lr")
    assert Path(learning_rate["origin"]["file"]).is_absolute()
    assert learning_rate["origin"]["override"] is None
    (replaced,) = learning_rate["replaced"]
    assert replaced["value"] == "???"
    assert replaced["origin"]["file"].endswith("/conf/trainer/_settings.yaml")
    assert replaced["origin"]["line"] == 18


@pytest.mark.parametrize(("arguments", "message"), [
    (["trainer.num_node"], "no key 'trainer.num_node'; closest: 'trainer.num_nodes'"),
    (["optimizr"], "no key 'optimizr'; closest: 'trainer.optimizer'"),
    (["data.num_layers"], "no key 'data.num_layers'; closest: 'model.num_layers'"),
    ([""], "no key ''; closest: '"),
    (["~env.A", "+env.A=1", "env.A"], "no key 'env.A'; closest: '"),
    (["~trainer.optimizer", "trainer.optimizer.lr"],
     "no key 'trainer.optimizer.lr': it was removed by command line, ~trainer.optimizer"),
    (["--al"], "no option '--al'; closest: '--all'"),
    (["trainer.num_nodse=1"], "no key 'trainer.num_nodse'; closest: 'num_nodes'"),
    (["recipe=llama/llama3_8b_pretrain"], "explain takes one recipe, as recipe=NAME; `list`"),
])  # fmt: skip
def test_a_wrong_question_gets_one_message(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    said = refuse(tmp_path, "explain", f"recipe={TINY}", *arguments)

    assert said.startswith(message) or "Could not delete" in said, said
    assert len(said.splitlines()) <= 2


def test_what_cannot_be_a_job_is_explained_as_well(tmp_path: Path) -> None:
    """Values that are missing, fit nothing or refer to nothing are what one asks about."""
    (tmp_path / "broken.yaml").write_text(
        "# @package _global_\ntrainer:\n  num_nodes: ${none.there}\n  kind: ???\nbad: 1\n"
    )

    ended = launch("explain", "recipe=broken.yaml", folder=tmp_path)

    assert ended.status == 0, ended.err
    assert ended.out.startswith(
        "trainer.num_nodes: ${none.there}\n"
        "  from broken.yaml, line 3, as ${none.there}\n"
        "trainer.kind: ???\n"
        "  from broken.yaml, line 4\n"
        "bad: 1\n"
        "  from broken.yaml, line 5\n"
    )


def test_a_reference_to_a_section_and_to_an_item_of_a_list_are_told(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - llama/llama3_tiny_checkpointless\n  - _self_\n"
        "env:\n  A: ${trainer.optimizer}\n  B: ${resilience.faults.injected[0].step}\n"
    )

    ended = launch("explain", "recipe=mine.yaml", "env.A", "env.B", folder=tmp_path)

    assert (
        "  refers to trainer.optimizer: a section, from conf/trainer/_settings.yaml, line 17\n"
        in (ended.out)
    )
    assert ended.out.startswith('env.A: {"lr": 0.003, "min_lr": 0.0003, "warmup_steps": 20, ')
    assert ended.out.endswith(
        "env.B: 60\n"
        "  from mine.yaml, line 7, as ${resilience.faults.injected[0].step}\n"
        "  refers to resilience.faults.injected[0].step: 60, "
        "from recipes/llama/llama3_tiny_checkpointless.yaml, line 26\n"
    )


def test_a_file_of_another_search_path_is_named(tmp_path: Path) -> None:
    for folder in ("more", "ourpackage"):
        (tmp_path / folder / "model").mkdir(parents=True)
        text = "defaults: [llama3_tiny, _self_]\nnum_layers: 7\n"
        (tmp_path / folder / "model" / f"{folder}.yaml").write_text(text)
        (tmp_path / folder / "__init__.py").write_text("")
    path = f"hydra.searchpath=[file://{tmp_path}/more,pkg://ourpackage]"

    for name in ("more", "ourpackage"):
        ended = launch(
            "explain", f"recipe={TINY}", f"model={name}", "model.num_layers", path, folder=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[4]}"},
        )  # fmt: skip

        assert ended.out.startswith(
            f"model.num_layers: 7\n  from {name}/model/{name}.yaml, line 2 (model={name})\n"
        ), ended


def test_a_value_that_is_not_the_composed_one_is_unknown() -> None:
    folded = fold([FileLayer({"a": 1, "b": 2}, Lines(), Origin(file="f"))])
    explainer = Explainer({"a": 1, "b": 3, "c": []}, {"a": 1, "b": 3, "c": []}, folded)

    known, *unknown = explainer.explain()

    assert known.origin == Origin(file="f")
    assert [list(explained_lines(each)) for each in unknown] == [
        ["b: 3", "  unknown"], ["c: []", "  unknown"],
    ]  # fmt: skip
    assert explained_data(unknown[0])["origin"] == "unknown"


SECRET = "Tr0ub4dor"


def test_no_secret_is_shown_and_nothing_is_taken_from_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", SECRET)
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    profile = f"defaults: [slurm, _self_]\npassword: {SECRET}\ntoken: {SECRET}\n"
    (tmp_path / "conf" / "cluster" / "ours.yaml").write_text(profile)
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - llama/llama3_tiny_pretrain\n  - override /cluster: ours\n  - _self_\n"
        "env:\n"
        "  A: ${cluster.password}\n"
        "  B: ${cluster.${env.C}}\n"
        "  C: password\n"
        "  D: ${oc.env:CANARY}\n"
        "  E: ${env.D}\n"
        "  F: ${oc.${env.G}:CANARY}\n"
        "  G: env\n"
        "  H: '\\\\${oc.env:CANARY}'\n"
    )
    arguments = ("recipe=mine.yaml", f"+vault.password={SECRET}", "cluster.token=null")

    for options in (("--all",), ("--all", "--json")):
        ended = launch("explain", *arguments, *options, folder=tmp_path)

        assert ended.status == 0, ended.err
        assert SECRET not in ended.out + ended.err
        assert "(not shown)" in ended.out
        assert "${oc.env:CANARY}" in ended.out
    difference = launch("diff", "mine.yaml", TINY, "--origins", folder=tmp_path)
    assert difference.status == 1
    assert SECRET not in difference.out + difference.err
    assert "env.A: '(not shown)'" in difference.out or "env.A: (not shown)" in difference.out
    refused = refuse(tmp_path, *arguments)
    assert SECRET not in refused
