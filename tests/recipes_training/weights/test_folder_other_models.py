"""Weights of a model that computes something else than the job's are refused, whatever differs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.job.parameters import shapes
from launcher.job.workload import Model
from recipes_training.errors import WeightsError
from recipes_training.weights.export import make_config
from recipes_training.weights.folder import check_weights, open_weights
from tests.recipes_training.jobs import GPT_OSS, LLAMA, make_job

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder: Path, values: dict[str, Any], **keys: Any) -> Model:
    """Write weights of the model, with keys of config.json replaced."""
    model = make_job(model=values).model
    make_config(model).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    tensors = {name: torch.randn(shape) for name, shape in shapes(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("values", [LLAMA, GPT_OSS, {**GPT_OSS, "rope_scaling": None}])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"dtype": "bfloat16", "use_cache": False, "architectures": None, "pad_token_id": 0},
        {"max_position_embeddings": 4096, "initializer_range": 0.5, "bos_token_id": 7},
    ],
)
def test_what_does_not_change_what_is_computed_is_free(tmp_path, values, keys):
    check_weights(tmp_path, write(tmp_path, values, **keys))


@pytest.mark.parametrize(
    ("values", "key", "value"),
    [
        (LLAMA, "attention_bias", True),
        (LLAMA, "mlp_bias", True),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "attention_dropout", 0.1),
        (LLAMA, "pretraining_tp", 2),
        (LLAMA, "auto_map", {"AutoModelForCausalLM": "own.Own"}),
        (GPT_OSS, "hidden_act", "gelu"),
        (GPT_OSS, "attention_bias", False),
        (GPT_OSS, "layer_types", ["full_attention"] * 2),
    ],
)
def test_a_key_that_no_job_has_and_that_changes_what_is_computed_is_refused(
    tmp_path, values, key, value
):
    model = write(tmp_path, values, **{key: value})

    with pytest.raises(WeightsError, match=f"has {key} .*no setting of a job changes that"):
        check_weights(tmp_path, model)


@pytest.mark.parametrize("values", [LLAMA, GPT_OSS])
def test_every_number_that_a_job_has_is_compared(tmp_path, values):
    for key, value in make_config(make_job(model=values).model).to_dict().items():
        if (
            type(value) is not int
            or not value
            or key.endswith(("_token_id", "max_position_embeddings"))
        ):
            continue
        model = write(tmp_path, values, **{key: 2 * value})
        with pytest.raises(WeightsError, match=f"{key} |model.weights"):
            check_weights(tmp_path, model)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "score.weight",
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path, name):
    model = write(tmp_path, LLAMA)
    add(tmp_path, {name: torch.ones(3)})

    for read in (check_weights, open_weights):
        with pytest.raises(WeightsError, match=f"has {name}, which the model does not have"):
            read(tmp_path, model)


def test_frequencies_of_older_versions_follow_from_the_config(tmp_path):
    model = write(tmp_path, LLAMA)
    add(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})

    check_weights(tmp_path, model)


def test_a_second_copy_of_tied_embeddings_has_to_be_equal(tmp_path):
    model = write(tmp_path, {**LLAMA, "tie_embeddings": True})
    values = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    rows = (slice(3, 5),)

    add(tmp_path, {HEAD: values.clone()})
    check_weights(tmp_path, model)
    read = open_weights(tmp_path, model).read(EMBEDDING, values.shape, rows)
    assert torch.equal(read, values[3:5])
    values[4, 1] += 1
    add(tmp_path, {HEAD: values})

    with pytest.raises(WeightsError, match=f"other values in '{HEAD}' than in '{EMBEDDING}'"):
        open_weights(tmp_path, model).read(EMBEDDING, values.shape, rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_values_of_a_type_that_would_be_read_as_others_are_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = write(tmp_path, LLAMA)
    add(tmp_path, {HEAD: torch.zeros(shapes(model)[HEAD]).to(dtype)})

    with pytest.raises(WeightsError, match=f"has {HEAD} as .*; allowed: F32, BF16, F16"):
        check_weights(tmp_path, model)


def test_an_index_has_to_name_all_tensors_of_its_files_once(tmp_path: Path) -> None:
    model = write(tmp_path, LLAMA)
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    tensors = load_file(single)
    save_file(tensors, tmp_path / "a.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))

    with pytest.raises(WeightsError, match=r"index.json and model.safetensors; remove one"):
        check_weights(tmp_path, model)
    single.unlink()
    check_weights(tmp_path, model)
    save_file({HEAD: tensors[HEAD] + 1}, tmp_path / "b.safetensors")
    index.write_text(
        json.dumps(
            {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {HEAD: "b.safetensors"}}
        )
    )
    with pytest.raises(
        WeightsError, match=rf"a.safetensors has {HEAD}, and model.safetensors.index"
    ):
        check_weights(tmp_path, model)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"cannot read .*a.safetensors: "):
        check_weights(tmp_path, model)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    """Opening it would wait for ever."""
    model = write(tmp_path, LLAMA)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)

    with pytest.raises(WeightsError, match="is no plain file"):
        check_weights(tmp_path, model)
