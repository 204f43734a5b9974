"""FSDP2's steps, which can be ended and forgotten in the midst of a layer.

torch has no call to forget a step: what an aborted one leaves in FSDP2 would double a layer's
gradient or end its reduction without a word. What is undone here is that of torch 2.9 to 2.13;
the tests abort a step at every layer and compare bits.

gloo has no reduce-scatter; torch makes one of an all-reduce and a copy. What it
returns waits for that all-reduce without a limit and heeds none that it is
given, so a rank could wait for peers that are gone. Here it is the same
operation, waited for as any other; the sums have the same bits.
"""

# ruff: noqa: SLF001 - there is no other way in

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def end_waits(core: nn.Module, on_sum: Callable[[Tensor], None]) -> None:
    """Have the model's reduce-scatters end with their generation; for groups of gloo.

    `on_sum` is given the sum of what this rank puts into each.
    """
    for module in core.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_AllReduceAndCopy(on_sum))  # type: ignore[arg-type]


def leave_step(run: FSDPModule) -> None:
    """Undo what FSDP2 has begun, but for gradients that are reduced and sharded."""
    assert isinstance(run, nn.Module)
    for group in param_groups(run):
        # Else the reset waits for an exchange that has failed.
        group._all_gather_result = None
    state = run._get_fsdp_state()
    if state._is_root is not None:
        _reset(state)
    for group in param_groups(run):
        group.all_reduce_grads = True
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
            param.to_sharded()


def _reset(state: Any) -> None:
    """Have the root forget the step that it was in."""
    if hasattr(state, "_reset_iter_state"):
        # The public call imports a compiler, which takes seconds in the midst of a recovery.
        state._reset_iter_state()
        return
    comm, context = state._comm_ctx, state._state_ctx
    groups = [group for each in context.all_states for group in _groups_of(each)]
    has_list = hasattr(comm, "reduce_scatter_states")  # in torch 2.12
    scattered = comm.reduce_scatter_states if has_list else [comm.reduce_scatter_state]
    begun = [comm.all_gather_state, *scattered]
    begun += [each._all_reduce_state for each in groups]
    events = [each.event for each in begun if each is not None]
    events += [each._post_reduce_event for each in groups]
    events += [each._reshard_after_forward_event for each in groups]
    for event in events:
        if event is not None:
            # Kernels that were queued write to memory that is about to be used again.
            state._device_handle.current_stream().wait_event(event)
    comm.all_gather_state = comm.reduce_scatter_state = None
    if has_list:
        comm.reduce_scatter_states.clear()
    comm.post_forward_order.clear()
    for each in context.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
    for group in groups:
        group._all_reduce_state = group._post_reduce_event = None
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def mesh_sizes(run: nn.Module | FSDPModule) -> tuple[int, ...]:
    """Return the sizes of the mesh over which a model is sharded, by axis."""
    return tuple(next(param_groups(run)).mesh_info.mesh.shape)


def is_in_order(run: nn.Module | FSDPModule) -> bool:
    """Return whether all meshes of a model have the ranks of the world, in their order."""
    wanted = list(range(dist.get_world_size()))
    return all(each.mesh_info.mesh.mesh.flatten().tolist() == wanted for each in param_groups(run))


def param_groups(run: nn.Module | FSDPModule) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters, in the order of their modules."""
    assert isinstance(run, nn.Module)
    for module in run.modules():
        if isinstance(module, FSDPModule):
            yield from _groups_of(module._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # since torch 2.12; before, one group a module
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


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
