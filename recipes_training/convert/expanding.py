"""Expands weights that are packed as MXFP4, as GPT-OSS is published, one tensor after the other.

A tensor is expanded one expert after the other by transformers' own dequantiser: beside the tensor
itself and one file of output there is never more in memory than an expert.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from recipes_training.convert.output import Output
from recipes_training.errors import ConversionError, WeightsError, describe
from recipes_training.weights.folder import PACKED, WeightsFolder, find_packing, read_config

_KEY = "the folder"
_BLOCK = 32
"""Values that share a scale."""
_BLOCKS_AT_ONCE = 1 << 16
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")


def plan_expansion(folder: Path, dtype: torch.dtype | None) -> Output:
    """Return the plain model of a packed folder; without `dtype` in bf16.

    Raises ConversionError where there is nothing to expand, and WeightsError where the folder is
    damaged.
    """
    config = read_config(folder, key=_KEY)
    packing = find_packing(config)
    if packing is None:
        raise ConversionError(f"{folder} has plain weights already; set model.weights to it")
    if packing != PACKED:
        raise ConversionError(f"{folder} is quantised as {packing!r}; allowed: {PACKED!r}")
    del config.quantization_config
    dtype = dtype or torch.bfloat16
    weights, known = (
        WeightsFolder(folder, key=_KEY, is_tied=config.tie_word_embeddings),
        _shapes(config, folder),
    )
    asked: set[str] = set()
    for name in known:
        if name not in weights and _blocks(name) not in weights:
            raise WeightsError(f"{_KEY} {folder} has no parameter {name!r}")
        asked |= {name} if name in weights else {_blocks(name), f"{name}_scales"}
    weights.check_asked(asked)

    def gather(name: str) -> Tensor:
        if name in weights:
            return weights.read(name, known[name]).to(dtype)
        return _expand(weights, name, known[name], dtype)

    beside = [each for each in sorted(folder.iterdir()) if _is_beside(each)]
    return Output(shapes=known, dtype=dtype, gather=gather, config=config, beside=tuple(beside))


def _shapes(config: Any, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the model's parameters."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # what is raised for a value depends on the model
        raise WeightsError(
            f"{_KEY} {folder} has model_type {config.model_type!r}, and transformers makes no "
            f"causal language model of its config: {describe(error)}"
        ) from error
    return {name: tuple(each.shape) for name, each in model.named_parameters()}


def _expand(
    weights: WeightsFolder, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a whole tensor of (experts, inputs, outputs), which is packed along its inputs."""
    num_experts, inputs, outputs = shape
    scales_shape = (num_experts, outputs, math.ceil(inputs / _BLOCK))
    whole = torch.empty(shape, dtype=dtype)
    for expert in range(num_experts):
        own = (slice(expert, expert + 1),)
        whole[own] = convert_moe_packed_tensors(
            weights.read(_blocks(name), (*scales_shape, _BLOCK // 2), own),
            weights.read(f"{name}_scales", scales_shape, own),
            dtype=dtype,
            rows_per_chunk=_BLOCKS_AT_ONCE,
        )
    return whole


def _blocks(name: str) -> str:
    return f"{name}_blocks"


def _is_beside(path: Path) -> bool:
    """Return whether a file goes along as it is, as a tokenizer does."""
    is_other = path.name != "config.json" and not path.name.startswith(".")
    return is_other and path.is_file() and not path.name.endswith(_WEIGHTS)
