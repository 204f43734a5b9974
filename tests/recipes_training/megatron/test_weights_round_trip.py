"""Weights go into Megatron's model and out of it with the same bits, and mean the same there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from recipes_training.plan import plan_model_config
from tests.cases import slow
from tests.recipes_training.jobs import GPT_OSS, LLAMA, MEGATRON, make_job
from tests.recipes_training.workers import Workers

# Tensor ranks divide the vocabulary.
_LLAMA = {**LLAMA, "vocab_size": 260}
_GPT_OSS = {**GPT_OSS, "vocab_size": 260}
# A step that changes nothing, not even a zero.
_STILL = {"lr": 1e-60, "min_lr": 0.0, "warmup_steps": 0}
_TENSOR = {"tensor_parallel": 2, "num_devices": 2}
_SEQUENCE = {**_TENSOR, "sequence_parallel": True}
_STAGES = {"pipeline_parallel": 2, "num_devices": 2}
_EXPERTS = {"expert_parallel": 2, "num_devices": 2}


def make_model(values: dict[str, Any]) -> nn.Module:
    """Return a model whose every value is random, norms and biases as well."""
    is_llama = values["architecture"] == "llama"
    config = plan_model_config(make_job(model=values).model)
    torch.manual_seed(5)
    model = (
        LlamaForCausalLM(LlamaConfig(**config))
        if is_llama
        else GptOssForCausalLM(GptOssConfig(**config))
    )
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.normal_(mean=1.0 if name.endswith("norm.weight") else 0.0, std=0.2)
    return model.eval()


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        slow(_LLAMA, {}, id="llama"),
        slow(_LLAMA, _TENSOR, id="llama-tensor"),
        slow(_LLAMA, _STAGES, id="llama-pipeline"),
        slow({**_LLAMA, "tie_embeddings": True}, _TENSOR, id="llama-tied-tensor"),
        slow(_GPT_OSS, {}, id="gpt-oss"),
        slow(_GPT_OSS, _SEQUENCE, id="gpt-oss-tensor"),
        slow(_GPT_OSS, _STAGES, id="gpt-oss-pipeline"),
        slow(_GPT_OSS, _EXPERTS, id="gpt-oss-experts"),
        pytest.param(_GPT_OSS, {**_SEQUENCE, **_EXPERTS}, id="gpt-oss-tensor-experts"),
    ],
)
def test_weights_come_back_with_their_bits_and_mean_the_same(
    workers: Workers, tmp_path: Path, values: dict[str, Any], layout: dict[str, Any]
) -> None:
    model = make_model(values)
    model.save_pretrained(tmp_path / "weights")
    text = torch.randint(values["vocab_size"], (2, 16))
    torch.save(text, tmp_path / "text.pt")
    job = make_job(
        model={**values, "weights": str(tmp_path / "weights")},
        trainer={
            **MEGATRON,
            **layout,
            "max_steps": 1,
            "optimizer": {**MEGATRON["optimizer"], **_STILL},
        },
    )

    outcome = workers.run(
        job, tmp_path, target="tests.recipes_training.megatron.programs:write_logits"
    )

    expected = {name: each.detach() for name, each in model.named_parameters()}
    assert outcome.weights() == {name: each.numpy().tobytes() for name, each in expected.items()}
    parts = [torch.load(each) for each in sorted(tmp_path.glob("logits-tp*.pt"))]
    with torch.no_grad():
        theirs = model(input_ids=text).logits
    assert len(parts) == layout.get("tensor_parallel", 1)
    assert theirs.std() > 0.5
    assert (torch.cat(parts, dim=-1) - theirs).abs().max() < 1e-4


def test_an_export_that_lacks_a_part_is_refused_and_nothing_is_written(
    workers: Workers, tmp_path: Path
) -> None:
    job = make_job(model=_LLAMA, trainer={**MEGATRON, **_TENSOR, "max_steps": 1})

    outcome = workers.run(
        job,
        tmp_path,
        target="tests.recipes_training.megatron.programs:withhold",
        is_success_expected=False,
    )

    name = "model.layers.0.self_attn.o_proj.weight"
    told = f"the ranks have 0 of the 1,024 values of {name!r}"
    assert outcome.statuses == [1, 1]
    assert f"cannot write the checkpoint {tmp_path / 'checkpoint'}: {told}" in outcome.log()
    assert not list(tmp_path.glob("checkpoint*"))
