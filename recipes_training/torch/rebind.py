"""Makes a model that outlives its process groups fit for the next generation, in place.

torch has no call for it: a DTensor finds its groups by name through its mesh, FSDP2 keeps them in
its mesh infos, and what an aborted step leaves in FSDP2 would double a layer's gradient or end
its reduction without a word. What is undone here is that of torch 2.11 and 2.13; the tests abort a
step at every layer and compare bits.
"""

# ruff: noqa: SLF001 - there is no other way in

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from recipes_training.torch.model import SpreadModel
from resilience.comm.world import drop_groups, open_axes


def take_groups(model: SpreadModel) -> None:
    """Take the open world's groups, and leave the model as it is between two steps.

    Reduced gradients stay, so that an update that has begun can be ended. Every rank has to
    call it, those that make their model anew in its place, after the same other groups.
    """
    if model.reducer is not None:
        model.reducer.take_group()
        return
    assert isinstance(model.run, FSDPModule)
    _leave_step(model.run)
    _swap_groups(model.run)


def clear_step(model: SpreadModel) -> None:
    """Throw away what an aborted step has left; needs no other rank."""
    if model.reducer is not None:
        model.reducer.clear()
        return
    if isinstance(model.run, FSDPModule):
        _leave_step(model.run)
    for group in _param_groups(model.run):
        for param in group.fsdp_params:
            param.sharded_param.grad = None


def _leave_step(run: FSDPModule) -> None:
    """Undo what FSDP2 has begun, but for gradients that are reduced and sharded."""
    assert isinstance(run, nn.Module)
    for group in _param_groups(run):
        # Else the reset waits for an exchange that has failed.
        group._all_gather_result = None
    state = run._get_fsdp_state()
    if state._is_root is not None:
        _reset(state)
    for group in _param_groups(run):
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
    groups = [each._fsdp_param_group for each in context.all_states if each._fsdp_param_group]
    begun = [comm.all_gather_state, comm.reduce_scatter_state]
    begun += [each._all_reduce_state for each in groups]
    events = [each.event for each in begun if each is not None]
    events += [each._post_reduce_event for each in groups]
    events += [each._reshard_after_forward_event for each in groups]
    for event in events:
        if event is not None:
            # Kernels that were queued write to memory that is about to be used again.
            state._device_handle.current_stream().wait_event(event)
    comm.all_gather_state = comm.reduce_scatter_state = None
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


def _swap_groups(run: FSDPModule) -> None:
    """Put the open world's groups wherever FSDP2 and its tensors keep theirs.

    A copy keeps its ranks; how many copies there are follows from the world.
    """
    param_groups = list(_param_groups(run))
    known = param_groups[0].mesh_info.mesh
    names = known.mesh_dim_names
    assert names
    num_shards = known.size(names.index("shard"))
    sizes = (dist.get_world_size() // num_shards, num_shards)[-len(names) :]
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    mesh = DeviceMesh.from_group(open_axes(sizes), known.device_type, ranks, mesh_dim_names=names)
    for each in _meshes(param_groups):
        own = each.mesh_dim_names
        fresh = mesh if own in (names, None) else mesh[own]
        # Tensors and specs hold the object itself.
        vars(each).clear()
        vars(each).update(vars(fresh))
    infos = chain.from_iterable((x.mesh_info, x.post_forward_mesh_info) for x in param_groups)
    before: list[ProcessGroup | None] = []
    for info in infos:
        if info is None:
            continue
        before.append(info.shard_process_group)
        info.shard_process_group = info.mesh.get_group(info.shard_mesh_dim)
        if info.replicate_mesh_dim is not None:
            before.append(info.replicate_process_group)
            info.replicate_process_group = info.mesh.get_group(info.replicate_mesh_dim)
            info.replicate_mesh_rank = info.replicate_process_group.rank()
    drop_groups(before)


def _meshes(param_groups: list[Any]) -> list[DeviceMesh]:
    """Return each mesh object once; those that are equal are many."""
    found = {}
    for group in param_groups:
        for param in group.fsdp_params:
            spec = param.sharded_param._spec
            # torch 2.11 makes the third one whenever it is asked for.
            own = [getattr(param, "_shard_mesh", spec.mesh)]
            for mesh in (param.mesh_info.mesh, param._spmd_mesh, *own, spec.mesh):
                found[id(mesh)] = mesh
    return list(found.values())


def _param_groups(run: nn.Module | FSDPModule) -> Iterator[Any]:
    assert isinstance(run, nn.Module)
    for module in run.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            if hasattr(
                state, "_fsdp_param_groups"
            ):  # since torch 2.12 or 2.13; before, one group a module
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:
                yield state._fsdp_param_group
