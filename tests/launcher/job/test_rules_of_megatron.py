"""What Megatron cannot divide is refused with the value, and with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.recipes_training.jobs import GPT_OSS, LLAMA, MEGATRON, make_job

_FOUR = {**MEGATRON, "num_devices": 4}


@pytest.mark.parametrize(
    ("model", "trainer", "words"),
    [
        ({}, {"tensor_parallel": 2}, "model.vocab_size 259 does not divide by"),
        (
            {"vocab_size": 260, "ffn_hidden_size": 49},
            {"tensor_parallel": 2},
            "model.ffn_hidden_size 49 does not divide by trainer.tensor_parallel 2",
        ),
        (
            {},
            {"sequence_parallel": True},
            "trainer.sequence_parallel true needs trainer.tensor_parallel of at least 2",
        ),
        ({"head_dim": 33}, {}, "model.head_dim 33 is odd, and rotary position"),
        (
            {"tie_embeddings": True},
            {"pipeline_parallel": 2},
            "model.tie_embeddings true shares a matrix between the first and the last stage",
        ),
        (
            {**GPT_OSS, "vocab_size": 260},
            {"tensor_parallel": 2},
            "of a model with experts needs trainer.sequence_parallel, which is false",
        ),
        (
            GPT_OSS,
            {"expert_parallel": 3, "num_devices": 3, "global_batch_size": 6},
            "model.num_experts 4 does not divide by trainer.expert_parallel 3",
        ),
        (
            GPT_OSS,
            {"expert_parallel": 4, "num_replicas": 2},
            "does not divide by trainer.expert_parallel 4 x trainer.num_replicas 2",
        ),
    ],
)
def test_what_does_not_divide_is_refused(
    model: dict[str, Any], trainer: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        make_job(model={**LLAMA, **model}, trainer={**_FOUR, **trainer})

    assert words in str(caught.value)


def test_megatron_computes_in_bf16_on_a_cpu_and_torch_does_not() -> None:
    make_job(trainer={**_FOUR, "precision": "bf16"})

    with pytest.raises(ValidationError, match=r"trainer.precision 'bf16' needs an accelerator"):
        make_job(trainer={"precision": "bf16"})


def test_experts_are_whole_on_every_rank_so_their_size_need_not_divide() -> None:
    make_job(
        model={**GPT_OSS, "vocab_size": 260, "ffn_hidden_size": 49},
        trainer={**_FOUR, "tensor_parallel": 2, "sequence_parallel": True, "num_replicas": 1},
    )
