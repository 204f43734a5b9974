"""A model so small that a step costs the sleep of its micro batches, not the machine's cores.

Needs torch alone: a node that starts imports nothing besides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 272
WIDTH = 64
SEQUENCE = 32
MOMENTUM = 0.9
SEED = 1234


class SmallModel(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, VOCABULARY)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the mean loss of rows of tokens, of shape (samples, sequence + 1)."""
        logits = self.head(torch.relu(self.inner(self.table(rows[:, :-1]))))
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def fill(self) -> None:
        """Set the weights to what they are before the first step, in every process."""
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for each in self.parameters():
                each.normal_(0.0, 0.05, generator=generator)


def descend(parameters: Sequence[Tensor], momenta: Sequence[Tensor], lr: float) -> None:
    """Update by the gradients, with momentum; torch's own optimizers import its compiler."""
    with torch.no_grad():
        for parameter, momentum in zip(parameters, momenta, strict=True):
            assert parameter.grad is not None
            momentum.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(momentum, alpha=lr)
