"""Weights that are packed as MXFP4 become plain ones, with which a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from recipes_training.convert.__main__ import main
from tests.recipes_training.convert.packing import PACKABLE, write_packed
from tests.recipes_training.jobs import MEGATRON, TORCH, make_job
from tests.recipes_training.workers import Workers

STILL = {**TORCH["optimizer"], "lr": 1e-60, "min_lr": 0.0, "warmup_steps": 0}
"""A step changes nothing, not even a zero: what is written is what the run began with."""

PROGRAM = "tests.recipes_training.programs:train_quietly"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("weights") / "packed"
    return folder, write_packed(folder)


@pytest.mark.parametrize(("option", "dtype"), [((), "bfloat16"), (("--dtype=fp32",), "float32")])
def test_expanded_weights_are_what_their_codes_say(packed, tmp_path, capsys, option, dtype):
    folder, expected = packed
    target = tmp_path / "plain"

    assert main([str(folder), str(target), *option]) == 0

    model = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        # Each value of four bits has its own in bf16.
        assert torch.equal(found[name].float(), each), name
    assert {each.dtype for each in load_file(target / "model.safetensors").values()} == {
        getattr(torch, dtype)
    }
    assert (target / "tokenizer.json").read_text() == "{}"
    assert f"{target}: {len(expected)} tensors" in capsys.readouterr().out


@pytest.mark.parametrize("trainer", [TORCH, MEGATRON], ids=["torch", "megatron"])
def test_a_run_begins_with_expanded_weights(workers: Workers, packed, tmp_path, trainer):
    folder, expected = packed
    plain = tmp_path / "plain"
    assert main([str(folder), str(plain)]) == 0
    weights = {**PACKABLE, "weights": str(plain)}
    job = make_job(model=weights, trainer={**trainer, "max_steps": 1, "optimizer": STILL})

    outcome = workers.run(job, tmp_path / "run", target=PROGRAM)

    assert outcome.weights() == {name: each.numpy().tobytes() for name, each in expected.items()}
