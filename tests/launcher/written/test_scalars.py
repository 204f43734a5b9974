"""Texts of a file arrive as they were written, wherever a recipe takes texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.composition.compose import resolve
from launcher.composition.frozen import read_frozen
from launcher.composition.yaml_size import check_yaml, keep_texts
from launcher.errors import RecipeError
from launcher.job.cluster import K8sCluster
from launcher.versions.lock import parse_lock
from launcher.written.scalars import find_scalars
from tests.launcher.command import launch, put

# Text in a file, and what arrives.
WRITTEN = {"A": "1.10", "B": "010", "C": "1:30", "D": "on", "E": "NO", "F": "1e5", "G": "True",
           "H": "0x10", "I": "1_000", "J": "7", "K": "true", "L": ".inf"}  # fmt: skip
RECIPE = """\
# @package _global_
defaults: [llama/llama3_tiny_pretrain, override /cluster: ours, _self_]
recipe: {name: x, version: 1, schema: 1, description: d}
"""
PROFILE = """\
defaults: [k8s, _self_]
labels: {a: 1.10, b: NO}
annotations: {c: "010"}
node_selector: {d: 010}
affinity: {required: {e: [1.10, on]}, preferred: [{weight: 5, labels: {f: [1e5]}}]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    put(tmp_path / "conf" / "cluster" / "ours.yaml", PROFILE)
    variables = "".join(f"  {name}: {text}\n" for name, text in WRITTEN.items())
    path = tmp_path / "r.yaml"
    path.write_text(f"{RECIPE}env:\n{variables}  QUOTED: '010'\n  NONE: null\n")
    return path


def test_texts_of_recipes_and_groups_arrive_as_they_are_written(recipe: Path) -> None:
    job = resolve("r.yaml", (), recipe.parent)

    assert job.env == WRITTEN | {"QUOTED": "010", "NONE": None}
    cluster = job.cluster
    assert isinstance(cluster, K8sCluster)
    assert cluster.labels == {"a": "1.10", "b": "NO"}
    assert cluster.annotations == {"c": "010"}
    assert cluster.node_selector == {"d": "010"}
    assert cluster.affinity.required == {"e": ("1.10", "on")}
    assert cluster.affinity.preferred[0].labels == {"f": ("1e5",)}


def test_a_frozen_recipe_has_the_same_texts_and_refuses_one_that_would_change(recipe: Path) -> None:
    frozen = launch("freeze", "recipe=r.yaml", "+env.Z=2.50", folder=recipe.parent)
    assert frozen.status == 0, frozen.err
    path = recipe.parent / "frozen.yaml"
    path.write_text(frozen.out)

    again = resolve("frozen.yaml", (), recipe.parent)

    assert again.env == WRITTEN | {"QUOTED": "010", "NONE": None, "Z": "2.50"}
    lines = [line for line in frozen.out.splitlines(keepends=True) if "# content" not in line]
    path.write_text("".join(lines).replace("'1.10'", "1.10", 1))
    with pytest.raises(RecipeError, match=r"env\.A 1\.10 would be read as 1\.1; write '1\.10' in"):
        read_frozen(path)


def test_a_merged_mapping_keeps_its_texts() -> None:
    text = "x: &x {A: 1.10, B: 2.50}\nenv: {<<: *x, B: 010}\n"

    found = {each.place: each.text for each in find_scalars(text) if each.is_changed_text}

    assert found == {("env", "A"): "1.10", ("env", "B"): "010"}


def test_a_key_twice_in_the_lock_is_no_lock() -> None:
    with pytest.raises(RecipeError, match="lock, line 2: broken YAML: found duplicate key a"):
        parse_lock("a: []\na: []\n", "lock")


@pytest.mark.parametrize(
    "text", ["1.5", "1", "true", "False", "0", "-3", "1e-5", "0x10", "08", "x"]
)
def test_plain_numbers_are_taken(text: str) -> None:
    assert [each.problem for each in find_scalars(f"trainer: {{a: {text}}}") if each.problem] == []


def test_what_yaml_alone_refuses_is_left_to_it() -> None:
    with pytest.raises(yaml.YAMLError):
        list(find_scalars("a: [\n"))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param("{A: 1, <<: {A: 010}}", 1, id="number"),
        pytest.param("{<<: {A: 1.10}, A: 1.1}", 1.1, id="fraction"),
        pytest.param("{<<: {A: on}, A: plain}", "plain", id="text"),
        pytest.param('{<<: {A: on}, A: "True"}', "True", id="quoted"),
        pytest.param("{<<: {A: on}, A: null}", None, id="null"),
        pytest.param("{<<: [{A: on}, {B: x}], B: 1, A: y}", "y", id="two-sources"),
    ],
)
def test_a_value_of_its_own_stays_beside_one_that_is_merged(text: str, kept: object) -> None:
    content = yaml.safe_load(f"env: {text}")

    keep_texts(content, f"env: {text}")

    assert content["env"]["A"] == kept


def test_a_key_of_two_merged_mappings_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="duplicate key A"):
        list(find_scalars("env: {<<: [{A: on}, {A: x}]}"))


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 5000])
@pytest.mark.parametrize("key", ["env: {A", "trainer: {max_steps"])
def test_a_number_that_python_cannot_write_is_refused_with_its_line(key: str, digits: str) -> None:
    told = rf"^mine, line 2, column \d+: found a number of {len(digits)} characters; allowed: 1000"
    with pytest.raises(RecipeError, match=told):
        check_yaml(f"a: b\n{key}: {digits}}}\n", "mine")
