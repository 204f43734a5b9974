"""A message about a wrong field or a broken rule ends with where the values come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.composition.compose import resolve
from launcher.errors import RecipeError
from launcher.provenance.fold import FileLayer, Origin, OverrideLayer, fold
from launcher.provenance.lines import Lines
from launcher.provenance.named import add_origins
from tests.launcher.command import launch, refuse

TINY = "llama/llama3_tiny_pretrain"
CHECKPOINTLESS = "llama/llama3_70b_pretrain_checkpointless"
WORLD = (
    "world size 128 (trainer.num_nodes 16 x trainer.num_devices 8) does not divide by "
    "tensor_parallel 7 x pipeline_parallel 4 x context_parallel 1 = 28; set trainer.num_nodes to a "
    "multiple of 7, or change a degree"
)
STORE = "cluster.checkpoint_store_url=s3://bucket/runs"


def test_each_field_of_a_broken_rule_is_told_with_its_origin_once(tmp_path: Path) -> None:
    said = refuse(tmp_path, f"recipe={CHECKPOINTLESS}", STORE, "trainer.tensor_parallel=7")

    recipe = "recipes/llama/llama3_70b_pretrain.yaml"
    lines = said.splitlines()
    assert lines[lines.index(WORLD) + 1] == (
        f"  trainer.num_nodes 16: {recipe}, line 30; trainer.num_devices 8: {recipe}, line 31; "
        f"trainer.tensor_parallel 7: command line; trainer.pipeline_parallel 4: {recipe}, line 37; "
        "trainer.context_parallel 1: conf/trainer/megatron.yaml, line 9"
    )
    at = lines.index("model.num_kv_heads 8 does not divide by trainer.tensor_parallel 7; "
                     "allowed: 1, 2, 4, 8")  # fmt: skip
    assert lines[at + 1] == "  model.num_kv_heads 8: conf/model/llama3_70b.yaml, line 8"
    assert lines[-1] == f"  in recipe '{CHECKPOINTLESS}'"


def test_a_program_that_resolves_a_recipe_is_told_the_same(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(TINY, ["data.seq_length=100000"], tmp_path)

    assert str(caught.value) == (
        "data.seq_length 100000 is more than model.context_length 512\n"
        "  data.seq_length 100000: command line; model.context_length 512: "
        "conf/model/llama3_tiny.yaml, line 11\n"
        f"  in recipe '{TINY}'"
    )


def test_in_a_sweep_the_origin_is_that_of_the_job_that_is_wrong(tmp_path: Path) -> None:
    ended = launch("-m", f"recipe={TINY}", "trainer.seed=1,text", folder=tmp_path)

    assert ended.status == 2
    assert "\n  trainer.seed 'text': command line\n" in ended.err


def test_a_wrong_value_of_a_teams_file_is_found_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - {TINY}\n  - _self_\ntime_limit: 10\ntrainer:\n"
        "  num_nodse: 2\n  seed: text\n"
    )

    said = refuse(tmp_path, "recipe=mine.yaml")

    assert "\n  time_limit 10: mine.yaml, line 5\n" in said
    assert "\n  trainer.num_nodse 2: mine.yaml, line 7\n" in said
    assert "\n  trainer.seed 'text': mine.yaml, line 8\n" in said


def test_a_file_that_an_override_chose_is_told_with_the_override(tmp_path: Path) -> None:
    said = refuse(tmp_path, f"recipe={TINY}", "model=llama3_8b", "data.seq_length=10000")

    assert "; model.context_length 8192: conf/model/_llama3.yaml, line 3 (model=llama3_8b)" in said


FOLDED = fold([
    FileLayer(
        {"a": {"one_key": 1, "other_key": 2, "list": [{"b_c": 3}], "long": "x" * 100},
         "refers": {"here": "${a.one_key}"}, "top_key": None,
         "env": {"MY_TOKEN": "Tr0ub4dor"}},
        Lines(), Origin(file="f.yaml"),
    ),
    OverrideLayer(("a", "other_key"), 4, Origin(override="a.other_key=4")),
])  # fmt: skip


@pytest.mark.parametrize(("message", "origins"), [
    ("a.one_key 1 is more than a.other_key 4",
     "a.one_key 1: f.yaml; a.other_key 4: command line"),
    ("a.one_key 1 is more than other_key 4", "a.one_key 1: f.yaml; a.other_key 4: command line"),
    ("other_key 4 is no field by itself", None),
    ("top_key null: allowed: a number", "top_key null: f.yaml"),
    ("a.list[0].b_c 3 is wrong", "a.list[0].b_c 3: f.yaml"),
    ("refers.here 1 is wrong", "refers.here ${a.one_key}: f.yaml; a.one_key 1: f.yaml"),
    ("no key 'a.one_key'; closest: 'other_key'", "a.one_key 1: f.yaml"),
    ("a.none 1 of file.yaml and e.g. others", None),
    ("a.list is empty.", "a.list: f.yaml"),
    ("env.MY_TOKEN holds a value (not shown)", "env.MY_TOKEN (not shown): f.yaml"),
    ("a.long is too long", f"a.long '{'x' * 56}...: f.yaml"),
])  # fmt: skip
def test_the_fields_that_a_message_names_are_found(message: str, origins: str | None) -> None:
    assert add_origins([message], FOLDED) == [message, *([f"  {origins}"] if origins else [])]
