"""Makes a model that outlives its process groups fit for the next generation, in place.

torch has no call for it: a DTensor finds its groups by name through its mesh, FSDP2 keeps them in
its mesh infos, and what an aborted step leaves in FSDP2 would double a layer's gradient or end
its reduction without a word. What is undone here is that of torch 2.11 and 2.13; the tests abort a
step at every layer and compare bits.
"""

# ruff: noqa: SLF001 - there is no other way in

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from recipes_training.torch.model import SpreadModel
from resilience.comm.world import drop_groups, open_axes
from resilience.protection.fsdp_step import leave_step, param_groups


def take_groups(model: SpreadModel) -> None:
    """Take the open world's groups, and leave the model as it is between two steps.

    Reduced gradients stay, so that an update that has begun can be ended. Every rank has to
    call it, those that make their model anew in its place, after the same other groups.
    """
    if model.reducer is not None:
        model.reducer.take_group()
        return
    assert isinstance(model.run, FSDPModule)
    leave_step(model.run)
    _swap_groups(model.run)


def clear_step(model: SpreadModel) -> None:
    """Throw away what an aborted step has left; needs no other rank."""
    if model.reducer is not None:
        model.reducer.clear()
        return
    if isinstance(model.run, FSDPModule):
        leave_step(model.run)
    for group in param_groups(model.run):
        for param in group.fsdp_params:
            param.sharded_param.grad = None


def _swap_groups(run: FSDPModule) -> None:
    """Put the open world's groups wherever FSDP2 and its tensors keep theirs.

    A copy keeps its ranks; how many copies there are follows from the world.
    """
    groups = list(param_groups(run))
    known = groups[0].mesh_info.mesh
    names = known.mesh_dim_names
    assert names
    num_shards = known.size(names.index("shard"))
    sizes = (dist.get_world_size() // num_shards, num_shards)[-len(names) :]
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    mesh = DeviceMesh.from_group(open_axes(sizes), known.device_type, ranks, mesh_dim_names=names)
    for each in _meshes(groups):
        own = each.mesh_dim_names
        fresh = mesh if own in (names, None) else mesh[own]
        # Tensors and specs hold the object itself.
        vars(each).clear()
        vars(each).update(vars(fresh))
    infos = chain.from_iterable((x.mesh_info, x.post_forward_mesh_info) for x in groups)
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
