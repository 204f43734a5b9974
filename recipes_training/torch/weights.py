"""Fills a torch model from a folder in Hugging Face's layout, whose names are its own."""

from __future__ import annotations

import torch
from torch import nn

from recipes_training.torch.initial import local_part, local_rows
from recipes_training.weights.folder import WeightsFolder


def load_parameters(model: nn.Module, weights: WeightsFolder) -> None:
    """Set every parameter, or this worker's shard of it, to what the folder holds."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = local_rows(parameter)
            part = weights.read(name, parameter.shape, (slice(rows.start, rows.stop),))
            local_part(parameter).copy_(part)
