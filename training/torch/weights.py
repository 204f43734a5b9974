"""Weights from a local folder in Hugging Face's layout.

Each worker reads only the rows that it holds, straight from the safetensors
files, so no worker has a copy of the whole model. The folder has to have the
model's own parameter names: quantised weights are to be expanded beforehand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from training.errors import WeightsError, first_line
from training.torch.initial import local_part, local_rows

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
# What may differ between the run that made the weights and the one that takes them.
_FREE_KEYS = frozenset(
    {
        "initializer_range",
        "max_position_embeddings",
        "router_aux_loss_coef",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)


def load_parameters(model: nn.Module, folder: Path) -> None:
    """Set every parameter, or this worker's shard of it, to what the folder holds."""
    files = _read_index(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in files:
                raise WeightsError(f"model.weights {folder} has no parameter {name!r}")
            rows = _read_rows(files[name], name, parameter)
            local_part(parameter).copy_(rows)


def check_config(folder: Path, expected: dict[str, Any], architecture: str) -> None:
    """Refuse weights of a model that computes something else than the job's."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise WeightsError(f"model.weights {folder} has no usable config: {reason}") from error
    if config.model_type != architecture:
        raise WeightsError(
            f"model.weights {folder} is of architecture {config.model_type!r}, "
            f"model.architecture is {architecture!r}"
        )
    for key in expected.keys() - _FREE_KEYS:
        if (found := getattr(config, key)) != expected[key]:
            raise WeightsError(
                f"model.weights {folder} has {key} {found!r}, the job {expected[key]!r}; "
                "set the job's model to that of the weights"
            )


def _read_index(folder: Path) -> dict[str, Path]:
    """Return the file of each parameter."""
    try:
        if (index := folder / _INDEX_NAME).exists():
            names: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            return {name: folder / file for name, file in names.items()}
        single = folder / _SINGLE_NAME
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightsError(f"model.weights {folder} has no safetensors: {error}") from error


def _read_rows(path: Path, name: str, parameter: Tensor) -> Tensor:
    rows = local_rows(parameter)
    try:
        with safe_open(path, framework="pt") as file:
            found = file.get_slice(name)
            if (shape := tuple(found.get_shape())) != tuple(parameter.shape):
                raise WeightsError(
                    f"{name!r} in {path} has the shape {shape}, the model {tuple(parameter.shape)}"
                )
            part: Tensor = found[rows.start : rows.stop]
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {name!r} in {path}: {error}") from error
    return part
