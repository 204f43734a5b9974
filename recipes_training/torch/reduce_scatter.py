"""FSDP2's reduce-scatter on gloo, made of an operation whose wait can be ended.

gloo has no reduce-scatter; torch makes one of an all-reduce and a copy. What it
returns waits for that all-reduce without a limit and heeds none that it is
given, so a rank could wait for peers that are gone. Here it is the same
operation, waited for as any other; the sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def end_waits(core: nn.Module, on_sum: Callable[[Tensor], None]) -> None:
    """Have the model's reduce-scatters end with their generation; for groups of gloo.

    `on_sum` is given the sum of what this rank puts into each.
    """
    for module in core.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_AllReduceAndCopy(on_sum))  # type: ignore[arg-type]


class _AllReduceAndCopy:
    """Sums in place in the input, which FSDP2 has made for this, and copies a rank's part."""

    def __init__(self, on_sum: Callable[[Tensor], None]) -> None:
        self._on_sum = on_sum

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._on_sum(input_tensor.sum())
        dist.all_reduce(input_tensor, op=op, group=group)
        size = output_tensor.numel()
        part = input_tensor.view(-1)[group.rank() * size : (group.rank() + 1) * size]
        output_tensor.copy_(part.view_as(output_tensor))
