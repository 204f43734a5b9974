from __future__ import annotations

from typing import Any

import pytest

from launcher.job import Job
from recipes_training.megatron.plan import MegatronPlan, plan_megatron
from tests.recipes_training.jobs import (
    GPT_OSS,
    LLAMA,
    MEGATRON,
    MODEL_KEYS,
    make_job,
    with_other_value,
)


def _plan(model: dict[str, Any], trainer: dict[str, Any], seq_length: int = 16) -> MegatronPlan:
    job: Job = make_job(
        # Two tensor ranks divide an even vocabulary.
        model={**model, "vocab_size": 2 * model["vocab_size"]},
        trainer={**trainer, "num_nodes": 4, "num_devices": 8, "global_batch_size": 256},
        data={"seq_length": seq_length},
        instance={"type": "gpu", "accelerator": "gpu"},
    )
    return plan_megatron(job, job.trainer)


# These are the loop's: no part of Megatron-Core is told of them.
_OF_THE_LOOP = frozenset({
    "kind", "num_nodes", "num_devices", "max_steps", "global_batch_size", "log_every_n_steps",
    "save_checkpoint", "max_restarts", "non_finite", "threads_per_worker",
})  # fmt: skip
_OTHER = {
    "micro_batch_size": 4, "seed": 8, "precision": "bf16", "activation_checkpointing": True,
    "tensor_parallel": 2, "pipeline_parallel": 4, "virtual_pipeline": 2, "context_parallel": 2,
    "expert_parallel": 2, "sequence_parallel": True, "dropout": 0.1, "num_replicas": 2,
    "overlap_grad_reduce": False, "overlap_param_gather": False,
    "optimizer": {**MEGATRON["optimizer"], "lr": 1.0},
}  # fmt: skip


def test_keys_of_the_trainer_are_all_looked_at():
    assert set(MEGATRON) == _OF_THE_LOOP | set(_OTHER)


@pytest.mark.parametrize("key", _OTHER)
def test_every_key_of_the_trainer_changes_the_plan(key):
    # Experts with tensor parallelism need sequence parallelism, and that needs several ranks.
    model = {**(LLAMA if key == "tensor_parallel" else GPT_OSS), "num_layers": 4}
    base = {**MEGATRON, "pipeline_parallel": 2}
    if key == "sequence_parallel":
        model, base = {**LLAMA, "num_layers": 4}, {**base, "tensor_parallel": 2}

    assert _plan(model, base) != _plan(model, {**base, key: _OTHER[key]})


@pytest.mark.parametrize(
    ("key", "value"),
    # The others are the schedule's.
    [
        ("lr", 1.0),
        ("beta1", 0.5),
        ("beta2", 0.5),
        ("eps", 1e-3),
        ("weight_decay", 0.5),
        ("clip_norm", None),
    ],
)
def test_every_key_of_the_optimizer_changes_the_plan(key, value):
    other = {**MEGATRON, "optimizer": {**MEGATRON["optimizer"], key: value}}

    assert _plan(LLAMA, MEGATRON) != _plan(LLAMA, other)


@pytest.mark.parametrize(("model", "key"), MODEL_KEYS)
def test_every_key_of_the_model_changes_the_plan(model, key):
    assert _plan(model, MEGATRON) != _plan(with_other_value(model, key), MEGATRON)


def test_window_counts_the_token_itself():
    assert _plan(GPT_OSS, MEGATRON).transformer["window_size"] == (GPT_OSS["sliding_window"] - 1, 0)
