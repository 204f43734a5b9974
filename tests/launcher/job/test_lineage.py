"""Which jobs may go on from each other's state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.job.lineage import (
    changed_horizon,
    compare_jobs,
    differing_values,
    explain_misfit,
    fixed_values,
    lineage_digest,
)
from tests.launcher.shipped import RECIPES, changed_job, shipped_job
from tests.recipes_training.jobs import GPT_OSS, LLAMA, MEGATRON, make_job

TINY = "llama/llama3_tiny_pretrain"
JOB = shipped_job(TINY, "local")


@pytest.mark.parametrize(
    ("what", "path", "value"),
    [
        # What a state has to fit.
        ("refused", "model.num_layers", 1),
        ("refused", "model.ffn_hidden_size", 100),
        ("refused", "model.vocab_size", 400),
        ("refused", "model.rope_theta", 10.0),
        ("refused", "model.tie_embeddings", not JOB.model.tie_embeddings),
        # What training makes of a state.
        ("told", "trainer.optimizer.lr", 0.5),
        ("told", "trainer.optimizer.clip_norm", None),
        ("told", "trainer.optimizer.beta2", 0.5),
        ("told", "trainer.max_steps", 1000),
        ("told", "trainer.global_batch_size", 64),
        ("told", "trainer.seed", 7),
        ("told", "trainer.threads_per_worker", 3),
        ("told", "data.max_bytes", 100_000),
        ("told", "model.init_std", 0.5),
        # What no bit depends on.
        ("nothing", "name", "other"),
        ("nothing", "time_limit", "1-00:00:00"),
        ("nothing", "trainer.log_every_n_steps", 3),
        ("nothing", "trainer.max_restarts", 5),
    ],
)
def test_another_value_is_refused_or_told_as_a_state_and_its_training_need_it(
    what: str, path: str, value: Any
) -> None:
    other = changed_job(JOB, {path: value})

    found = compare_jobs(JOB, other)

    assert [each.key for each in found.refused] == [path] * (what == "refused")
    assert [each.key for each in found.told] == [path] * (what == "told")
    for each in (*found.refused, *found.told):
        assert str(each).endswith(f" -> {json.dumps(value)}")
    assert (lineage_digest(other) == lineage_digest(JOB)) == (what != "refused")
    assert differing_values(fixed_values(JOB), fixed_values(other)) == list(found.refused)


@pytest.mark.parametrize("recipe", RECIPES)
def test_features_and_clusters_keep_the_lineage(recipe: str) -> None:
    digests = {lineage_digest(shipped_job(recipe, kind)) for kind in ("local", "slurm", "job")}

    assert len(digests) == 1
    found = compare_jobs(shipped_job(recipe, "local"), shipped_job(recipe, "slurm"))
    assert [each.key for each in found.told] == ["cluster.kind"]


@pytest.mark.parametrize("key", ["tensor_parallel", "pipeline_parallel", "expert_parallel"])
def test_what_divides_megatrons_state_is_refused_with_both_layouts(key: str) -> None:
    trainer = {**MEGATRON, "num_devices": 2}
    before = make_job(trainer=trainer, model={**GPT_OSS, "vocab_size": 260})
    # Whether a degree may have that value is a question for other rules.
    other = before.model_copy(update={"trainer": before.trainer.model_copy(update={key: 2})})

    found = compare_jobs(before, other)

    assert [str(each) for each in found.refused] == [f"trainer.{key}: 1 -> 2"]
    assert lineage_digest(other) != lineage_digest(before)
    text = explain_misfit(fixed_values(before), fixed_values(other))
    layout = ", ".join(
        f"trainer.{each} 1" for each in ("tensor_parallel", "pipeline_parallel", "expert_parallel")
    )
    assert text == (
        f"it is divided by {layout}, and the job by "
        f"{layout.replace(f'{key} 1', f'{key} 2')} (python -m recipes_training.convert RUN_DIR OUT "
        "writes its weights, for model.weights=OUT)"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("num_devices", 2), ("num_replicas", 2), ("sequence_parallel", True)]
)
def test_any_number_of_data_ranks_goes_on_from_megatrons_state(key: str, value: Any) -> None:
    trainer = {**MEGATRON, "num_devices": 4, "tensor_parallel": 2}
    before = make_job(trainer=trainer, model={**LLAMA, "vocab_size": 260})

    found = compare_jobs(before, changed_job(before, {f"trainer.{key}": value}))

    assert found.refused == ()
    assert [each.key for each in found.told] == [f"trainer.{key}"]


def test_bytes_are_the_tokenizer_of_data_that_names_none() -> None:
    assert fixed_values(JOB)["data.tokenizer"] == "bytes"


def test_a_schedule_that_spans_the_run_is_asked_about() -> None:
    longer = changed_job(JOB, {"trainer.max_steps": 1000})
    fixed = changed_job(JOB, {"trainer.optimizer.decay_steps": 400})

    assert changed_horizon(JOB, longer) == (JOB.trainer.max_steps, 1000)
    assert changed_horizon(JOB, JOB) is None
    assert changed_horizon(fixed, changed_job(fixed, {"trainer.max_steps": 1000})) is None
    told = changed_job(longer, {"trainer.optimizer.decay_steps": 30})
    assert changed_horizon(JOB, told) is None
