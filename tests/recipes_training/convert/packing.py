"""Folders of weights as GPT-OSS is published: experts in blocks of 32 values of 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from recipes_training.plan import plan_model_config
from tests.recipes_training.jobs import GPT_OSS, make_job

# Both axes of the experts' matrices hold whole blocks.
PACKABLE: dict[str, Any] = {**GPT_OSS, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 260}
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
_BLOCK = 32


def write_packed(folder: Path, *, method: str = "mxfp4") -> dict[str, Tensor]:
    """Write random weights; returns what they are once they are expanded, in fp32."""
    model = make_job(model=PACKABLE).model
    torch.manual_seed(3)
    core = GptOssForCausalLM(GptOssConfig(**plan_model_config(model))).bfloat16()
    with torch.no_grad():
        for each in core.parameters():  # biases and norms, too
            each.normal_(std=0.05)
    core.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, expected = load_file(path), {}
    for name in list(tensors):
        tensor = tensors[name].float()
        if name.endswith(("gate_up_proj", "down_proj")):
            del tensors[name]
            codes, exponents = quantise(tensor.numpy())
            tensors[f"{name}_blocks"] = torch.from_numpy(
                np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)
            )
            scales = np.ascontiguousarray(exponents + 127, dtype=np.uint8)
            tensors[f"{name}_scales"] = torch.from_numpy(scales)
            tensor = torch.from_numpy(expand(codes, exponents))
        expected[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return expected


def quantise(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return codes (experts, outputs, blocks, 32) and exponents (experts, outputs, blocks)."""
    experts, inputs, outputs = weights.shape
    blocks = weights.transpose(0, 2, 1).reshape(experts, outputs, inputs // _BLOCK, _BLOCK)
    # The largest value, 6, is below 2 to the power of 3.
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))).astype(np.int64) - 2
    scaled = blocks / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - _VALUES).argmin(-1)
    return codes.astype(np.uint8), exponents


def expand(codes: NDArray[np.uint8], exponents: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return weights of (experts, inputs, outputs)."""
    values = _VALUES[codes] * np.exp2(exponents)[..., None]
    flat = values.reshape(*values.shape[:2], -1)
    return np.ascontiguousarray(flat.transpose(0, 2, 1), dtype=np.float32)
