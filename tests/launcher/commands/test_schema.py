"""The JSON Schema of a recipe: what editors complete, show and check."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from launcher.commands.schema import recipe_schema, recipe_schema_text
from launcher.job import Job, cluster
from launcher.job.fields import Section
from launcher.job.workload import LlamaModel, Transformer
from launcher.paths import shipped_folder
from resilience.docstrings import field_docstrings
from tests.launcher.shipped import RECIPES

SCHEMA = recipe_schema()
SECTIONS = {"recipe file": SCHEMA, "run": SCHEMA["properties"]["run"], **SCHEMA["$defs"]}
PROPERTIES = {
    f"{section}.{key}": node
    for section, definition in SECTIONS.items()
    for key, node in definition["properties"].items()
}
RECIPES_FOLDER = shipped_folder() / "recipes"


def check(value: Any, node: dict[str, Any]) -> Iterator[jsonschema.ValidationError]:
    whole = {**node, "$defs": SCHEMA["$defs"]}
    return jsonschema.Draft202012Validator(whole).iter_errors(value)


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_schema_beside_the_recipes_is_that_of_the_command() -> None:
    """`python -m launcher schema > recipes/recipe.schema.json` makes it again.

    Versions of pydantic write a bound as 0 or as 0.0, which is the same number.
    """
    kept = (RECIPES_FOLDER / "recipe.schema.json").read_text("utf-8")

    assert json.loads(kept) == json.loads(recipe_schema_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_shipped_recipes_fit_the_schema(recipe: str) -> None:
    content = yaml.safe_load((RECIPES_FOLDER / f"{recipe}.yaml").read_text("utf-8"))

    assert [error.message for error in check(content, SCHEMA)] == []


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param({}, id="recipe-is-missing"),
        pytest.param({"trainer": {"max_step": 1}}, id="mistyped-key"),
        pytest.param({"trainer": {"max_steps": "many"}}, id="wrong-type"),
        pytest.param({"action": "run"}, id="key-of-the-launcher"),
        pytest.param({"cluster": {"partition": "train"}}, id="key-of-a-cluster"),
    ],
)
def test_wrong_recipes_do_not_fit(recipe: dict[str, Any]) -> None:
    name = {"name": "a", "version": 1, "schema": 1, "description": "A test"}
    content = {"recipe": name, **recipe} if recipe else {}

    assert [*check(content, SCHEMA)]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"recipe": {"name": "a"}}, id="the-rest-is-inherited"),
        pytest.param({"trainer": {"max_steps": "???"}}, id="left-to-the-user"),
        pytest.param({"env": {"A": 1, "B": True}}, id="numbers-become-text"),
    ],
)
def test_what_the_launcher_takes_fits(content: dict[str, Any]) -> None:
    assert [*check({"recipe": {"name": "a"}, **content}, SCHEMA)] == []


def test_fields_of_clusters_have_docstrings_too() -> None:
    """A recipe sets none of them, and a profile's author reads them in the source."""
    models = [each for each in vars(cluster).values() if isinstance(each, type)]
    models = [each for each in models if issubclass(each, Section) and each is not Section]

    assert len(models) > 10
    for model in models:
        assert set(field_docstrings(model)) == set(model.model_fields), model


def test_every_property_is_described() -> None:
    """In a sentence, beside `anyOf`, with more words in it than the name has."""
    bare = [
        where
        for where, node in PROPERTIES.items()
        if not node.get("description", "").endswith(".")
        or _words(node["description"]) <= _words(where.rpartition(".")[2]) | {"the", "a", "of"}
    ]

    assert len(PROPERTIES) > 180
    assert bare == []


def _words(text: str) -> set[str]:
    return set(text.lower().replace("_", " ").strip(".").split())


def test_every_field_of_the_job_has_a_docstring() -> None:
    """Also the one that no recipe sets."""
    assert set(field_docstrings(Job)) == set(Job.model_fields)


def test_inherited_fields_have_the_docstrings_of_the_base() -> None:
    inherited = field_docstrings(Transformer)

    assert inherited.keys() == Transformer.model_fields.keys()
    assert inherited.items() <= field_docstrings(LlamaModel).items()


@pytest.mark.parametrize(
    ("where", "default"),
    [
        pytest.param("recipe file.time_limit", None, id="of-the-launcher"),
        pytest.param("Resources.shm_gib", 0, id="of-the-launcher-in-a-section"),
        pytest.param("Fault.rank", None, id="of-the-field"),
        pytest.param("MmapSettings.keep_s", 3600, id="of-a-group"),
        pytest.param("Optimizer.eps", 1e-8, id="of-the-file-that-a-group-begins-with"),
        pytest.param("MegatronTrainer.precision", "bf16", id="inherited"),
        pytest.param("ElasticSettings.nodes_max", "${trainer.num_nodes}", id="interpolation"),
        pytest.param("RamTier.keep", 1, id="of-all-tiers"),
        pytest.param("StoreTier.every_n_steps", 100, id="of-the-tiers-with-a-store"),
        pytest.param("ResilienceSettings.tiered", None, id="feature-is-off"),
        pytest.param("LlamaModel.weights", None, id="of-a-model"),
    ],
)
def test_defaults_are_shown(where: str, default: object) -> None:
    assert PROPERTIES[where]["default"] == default


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("TorchTrainer.num_nodes", id="left-to-the-recipe"),
        pytest.param("LlamaModel.vocab_size", id="dimension-of-a-model"),
        pytest.param("Instance.num_vcpus", id="number-of-a-table"),
        pytest.param("TieredSettings.store", id="section"),
    ],
)
def test_what_has_no_default_shows_none(where: str) -> None:
    assert "default" not in PROPERTIES[where]


def test_a_tier_that_has_another_default_is_named() -> None:
    assert PROPERTIES["StoreTier.every_n_steps"]["description"].endswith(
        " With resilience/tiered=aws the default is 500."
        " With resilience/tiered=ram_s3 the default is 500."
        " With resilience/tiered=run_folder the default is null."
        " With resilience/tiered=store the default is null."
    )


def test_defaults_fit_their_own_property() -> None:
    wrong = {
        where: error.message
        for where, node in PROPERTIES.items()
        if "default" in node
        for error in check(node["default"], node)
    }

    assert wrong == {}


@pytest.mark.parametrize("group", ["trainer", "data", "resilience"])
def test_every_section_of_a_group_has_defaults(group: str) -> None:
    """So that a new kind or feature is not forgotten."""
    node = SCHEMA["properties"][group]
    if group == "resilience":
        features = SCHEMA["$defs"]["ResilienceSettings"]["properties"].values()
        parts = [feature["anyOf"][0] for feature in features]
    else:
        parts = node["anyOf"]
    names = [part["$ref"].rpartition("/")[2] for part in parts]

    assert len(names) > 1
    for name in names:
        assert any("default" in node for node in SCHEMA["$defs"][name]["properties"].values()), name


def test_the_job_is_imported_without_reading_its_source() -> None:
    program = "import sys, launcher.job; print(*sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    loaded = set(done.stdout.split())
    assert "launcher.job" in loaded
    assert {"resilience.docstrings", "launcher.commands.schema"} & loaded == set()
