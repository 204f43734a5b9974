"""What counts for a recipe's digest, and what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.versions.digest import changed_keys, recipe_digest, recipe_values

CONFIG: dict[str, Any] = {
    "recipe": {"name": "a/b", "version": 1, "schema": 1, "description": "what it is"},
    "trainer": {"num_nodes": 2, "lr": 1e-3, "limit": None},
    "env": {},
    "cluster": {"kind": "slurm", "partition": "train"},
    "action": "run",
    "run": {"name": "x"},
    "hydra": {"verbose": True},
    "oversubscribe": True,
}


def digest(chosen: str | None = None, **changes: Any) -> str:
    return recipe_digest(recipe_values({**CONFIG, **changes}, chosen))


def test_variable_that_is_left_out_counts_and_one_that_is_asked_for_does_not() -> None:
    """The launcher would set the first by itself."""
    assert digest(env={"FI_PROVIDER": None}) != digest()
    assert digest(env={"WHO": "???"}) == digest()
    before, now = (recipe_values({**CONFIG, "env": env}, None) for env in ({}, {"A": None}))
    assert list(changed_keys(before, now)) == ['env.A: null -> "(left out)"']


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cluster": {"kind": "k8s"}}, id="cluster"),
        pytest.param({"action": "submit"}, id="action"),
        pytest.param({"run": {"name": "y"}}, id="run"),
        pytest.param({"hydra": {}}, id="hydra"),
        pytest.param({"oversubscribe": False}, id="oversubscribe"),
        pytest.param({"trainer": {"lr": 1e-3, "num_nodes": 2}}, id="a-null-less-and-another-order"),
        pytest.param({"trainer": {**CONFIG["trainer"], "new": None}}, id="a-new-key-that-is-off"),
        pytest.param(
            {"trainer": {**CONFIG["trainer"], "num": "???"}}, id="left-to-whoever-runs-it"
        ),
        pytest.param({"time_limit": "${oc.select:cluster.nothing,null}"}, id="of-a-profile"),
        pytest.param({"recipe": {**CONFIG["recipe"], "description": "other"}}, id="description"),
    ],
)
def test_what_says_nothing_of_the_training_changes_no_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) == digest()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"trainer": {**CONFIG["trainer"], "lr": 2e-3}}, id="value"),
        pytest.param({"trainer": {**CONFIG["trainer"], "num_nodes": 2.0}}, id="type"),
        pytest.param({"trainer": {**CONFIG["trainer"], "new": False}}, id="new-key"),
        pytest.param({"env": {"A": "1"}}, id="environment"),
        pytest.param({"recipe": {**CONFIG["recipe"], "version": 2}}, id="version"),
        pytest.param({"chosen": "ours"}, id="cluster-that-the-recipe-chooses"),
    ],
)
def test_what_says_something_of_it_changes_the_digest(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_a_reference_counts_as_what_it_refers_to() -> None:
    trainer = {"num_nodes": 2, "lr": "${trainer.base}", "base": 1e-3}
    same = {"num_nodes": 2, "lr": 1e-3, "base": 1e-3}

    assert digest(trainer=trainer) == digest(trainer=same)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("--scale=1 ${run.name}", "--scale=100 ${run.name}", True),
        ("${run.name}", "${run.dir}", True),
        ("${oc.select:cluster.a,1}", "${oc.select:cluster.a,2}", True),
        (r"\${x} ${cluster.kind}", r"\\\${x} ${cluster.kind}", True),
        ("${run.name} ${trainer.lr}", "${run.name} ${trainer.lr}", False),
        (None, "${run.name}", True),
        (None, "${oc.select:cluster.nothing,null}", False),
        ("???", None, False),
        ("${run.name}", "???", True),
    ],
)
def test_a_change_beside_a_reference_to_the_run_is_named(
    old: str | None, new: str | None, line: bool
) -> None:
    """Though the digest leaves such a value out."""
    configs = [{**CONFIG, "env": {"B": "b"}, "weights": each} for each in (old, new)]
    before, now = (recipe_values(each, None, is_written=True) for each in configs)

    told = f"weights: {json.dumps(old)} -> {json.dumps(None if new == '???' else new)}"
    assert list(changed_keys(before, now)) == ([told] if line else [])
    assert len({recipe_digest(recipe_values(each, None)) for each in configs}) == 1


def test_changes_are_named_by_key_with_both_values() -> None:
    before = {"a": {"b": 1, "gone": "x", "same": [1]}, "recipe": {"version": 1}}
    now = {"a": {"b": 2, "same": [1], "new": True}, "recipe": {"version": 2}}

    assert list(changed_keys(before, now)) == [
        "a.b: 1 -> 2",
        'a.gone: "x" -> null',
        "a.new: null -> true",
    ]
