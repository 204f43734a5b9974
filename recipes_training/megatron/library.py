"""What of Megatron-Core is called otherwise than it comes; the one place that changes it.

On gloo its reduce-scatter and all-gather are made of operations whose wait ends with their
generation; the sums have the same bits. What its local layers lack on a CPU is put right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_reduce_on_device: Callable[..., Any] = param_and_grad_buffer.dist_reduce_scatter_func
reduced_sums: list[Tensor] = []
"""Sums of what this rank has given to reductions of gradients, since they were cleared."""


class RMSNorm(nn.Module):
    """Megatron's norm without Transformer Engine, which knows no sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each tensor rank has seen a part of the sequence: Megatron sums such gradients.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, values: Tensor) -> Tensor:
        """Return the values over their root mean square, times the weight."""
        return nn.functional.rms_norm(values, self.weight.shape, self.weight, self._eps)


class _Ended:
    """What Megatron waits for where an operation is over when it returns."""

    def wait(self) -> None:
        """Return at once."""


def _sum_own_part(output: Tensor, values: Tensor, op: Any, group: Any) -> None:
    """Sum over the group in place in `values`, and copy the rank's part of them."""
    dist.all_reduce(values, op=op, group=group)
    part = values.view(-1).chunk(group.size())[group.rank()]
    if part.data_ptr() != output.data_ptr():
        output.copy_(part.view_as(output))


def _noting(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Note the sum of what a rank gives to a reduction of gradients."""

    def reduce_noted(output: Tensor, values: Tensor, **options: Any) -> Any:
        reduced_sums.append(values.sum())
        return reduce(output, values, **options)

    return reduce_noted


def _reduce_gradients(
    output: Tensor,
    values: Tensor,
    op: Any = dist.ReduceOp.SUM,
    *,
    group: Any,
    async_op: bool = False,
) -> _Ended | None:
    """Reduce and scatter a buffer, of which Megatron needs the rank's part alone afterwards."""
    _sum_own_part(output, values, op, group)
    return _Ended() if async_op else None


def _reduce_scatter(
    output: Tensor, values: Tensor, *, group: Any, async_op: bool = False
) -> _Ended | None:
    """Reduce and scatter values that stay as they are."""
    _sum_own_part(output, values.clone(), dist.ReduceOp.SUM, group)
    return _Ended() if async_op else None


def _all_gather(
    output: Tensor, values: Tensor, *, group: Any, async_op: bool = False
) -> _Ended | None:
    parts = list(output.view(-1).chunk(group.size()))
    # Megatron's values may be one of the parts.
    dist.all_gather(parts, values.reshape(-1).clone(), group=group)
    return _Ended() if async_op else None


@contextmanager
def _not_coalesced(*_: object, **__: object) -> Iterator[_Ended]:
    yield _Ended()


def _to_lists(sizes: Any, as_numpy: bool = False, **_: object) -> Any:
    """Return split sizes as a CPU's all-to-all wants them."""
    return sizes.numpy() if as_numpy and isinstance(sizes, Tensor) else sizes


def adapt(*, device_type: str) -> None:
    """Change Megatron for this process; any number of times."""
    # Its name is bound only where Transformer Engine is, and asked for everywhere.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    for name in (
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
    ):
        setattr(layers, name, _over_several_ranks(getattr(mappings, name)))
    buffers: Any = param_and_grad_buffer
    is_cpu = device_type == "cpu"
    buffers.dist_reduce_scatter_func = _noting(_reduce_gradients if is_cpu else _reduce_on_device)
    if not is_cpu:
        return
    buffers.dist_all_gather_func = _all_gather
    buffers._coalescing_manager = _not_coalesced  # noqa: SLF001
    for module in (layers, mappings):
        module.dist_reduce_scatter_func = _reduce_scatter
        module.dist_all_gather_func = _all_gather
    token_dispatcher.maybe_move_tensor_to_cpu = _to_lists


def _over_several_ranks(reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave values of a single rank as they are: an expert's bias is added to them in place."""

    def reduce_if_any(values: Tensor, group: ProcessGroup | None = None) -> Tensor:
        is_alone = group is not None and group.size() == 1
        return values if is_alone else reduce(values, group=group)

    return reduce_if_any


@contextmanager
def built_alone() -> Iterator[None]:
    """Let the block build an optimizer without the other ranks.

    Megatron has all ranks agree on one list of parameter groups, for checkpoints of its own. A
    process that replaces another builds while the others go on.
    """
    gather = dist.all_gather_object

    def gather_own(found: list[Any], own: Any, group: ProcessGroup | None = None) -> None:
        found[:] = [own] * len(found)

    setattr(dist, "all_gather_object", gather_own)  # noqa: B010
    try:
        yield
    finally:
        setattr(dist, "all_gather_object", gather)  # noqa: B010
