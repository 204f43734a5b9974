from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from recipes_training.plan import plan_model_config
from recipes_training.torch.initial import fill_parameters
from recipes_training.weights import draw as drawing
from tests.recipes_training.jobs import GPT_OSS, LLAMA, make_job

MODELS = [
    pytest.param(LLAMA, LlamaConfig, LlamaForCausalLM, id="llama"),
    pytest.param(GPT_OSS, GptOssConfig, GptOssForCausalLM, id="gpt-oss"),
]


@pytest.mark.parametrize(("model", "config", "architecture"), MODELS)
def test_parameters_begin_as_hugging_face_begins_them(model, config, architecture):
    torch.manual_seed(1)
    made = architecture(config(**plan_model_config(make_job(model=model).model)))
    theirs = {name: each.detach().clone() for name, each in made.named_parameters()}

    fill_parameters(made, seed=1, std=0.05)

    for name, ours in made.named_parameters():
        their = theirs[name]
        if their.unique().numel() == 1:
            assert torch.equal(ours, their), name
        else:
            # Sinks and router biases are few numbers.
            tolerance = 0.1 if ours.numel() > 1000 else 0.8
            assert ours.std().item() == pytest.approx(0.05, rel=tolerance), name
            assert their.std().item() == pytest.approx(0.05, rel=tolerance), name


def test_values_depend_on_seed_and_name():
    def fill(seed: int) -> torch.nn.ParameterDict:
        parameters = torch.nn.ParameterDict({"a": torch.empty(40), "b": torch.empty(40)})
        fill_parameters(parameters, seed=seed, std=1.0)
        return parameters

    first, again, other = fill(1), fill(1), fill(2)

    assert torch.equal(first["a"], again["a"])
    assert not torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], other["a"])


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 100), (0, 32), (31, 33), (32, 64), (50, 100), (99, 100), (70, 70)]
)
def test_part_of_a_parameter_is_that_part_of_the_whole(monkeypatch, start, stop):
    monkeypatch.setattr(drawing, "BLOCK_SIZE", 32)

    def draw(first: int, last: int) -> list[float]:
        blocks = drawing.normal_blocks("w", (10, 10), seed=3, start=first, stop=last)
        values = [float("nan")] * (last - first)
        for offset, block in blocks:
            values[offset : offset + len(block)] = block.tolist()
        return values

    assert draw(start, stop) == draw(0, 100)[start:stop]


def test_values_are_normal():
    parameters = torch.nn.ParameterDict({"a": torch.empty(3000, 700)})

    fill_parameters(parameters, seed=1, std=2.0)

    values = parameters["a"].detach().double()
    assert values.mean().item() == pytest.approx(0.0, abs=0.01)
    assert values.std().item() == pytest.approx(2.0, rel=0.01)
    assert (values.abs() < 2.0).double().mean().item() == pytest.approx(0.6827, abs=0.005)
