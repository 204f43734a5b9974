"""A small model on ranks of its own, saved and loaded: whole tensors as bytes.

Kinds: "replicated" on each rank as with DDP, "full" sharding over all ranks, and "hybrid", sharded
over the ranks of a replica, of which there are two where there are two ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from resilience.state.torch_state import TorchState, materialise
from resilience.tiered.client import TieredClient
from resilience.tiered.loader import load, whole_steps
from resilience.tiered.saver import Saver

STEP = 7
# Sizes that no world size here divides, and some with fewer rows than ranks.
SIZES = ((37, 24), (24, 5), (5, 3), (3, 40))


def _open(rank: int, size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store-{size}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.set_num_threads(1)


def count_shards(kind: str, size: int) -> int:
    """Return in how many parts so many ranks have the state."""
    return {"replicated": 1, "full": size, "hybrid": max(1, size // 2)}[kind]


def _make(rank: int, size: int, *, seed: int, kind: str) -> tuple[nn.Module, TorchState]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(first, second) for first, second in SIZES))
    num_shards = count_shards(kind, size)
    if kind != "replicated":
        shape, names = ((size,), ("shard",)) if kind == "full" else (
            (size // num_shards, num_shards), ("replica", "shard")
        )  # fmt: skip
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    materialise(optimizer)
    shard = "" if kind == "replicated" else str(rank % num_shards)
    return model, TorchState(model, optimizer, shard=shard)


def _whole(state: TorchState) -> dict[str, bytes]:
    """Return the bytes of all whole tensors; a collective."""
    found = {}
    for name, tensor in state._entries():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def train_and_save(
    rank: int, size: int, folder: str, socket: str, kind: str = "full"
) -> dict[str, bytes]:
    """Take steps, save the state, and return its whole tensors."""
    _open(rank, size, folder)
    model, state = _make(rank, size, seed=1, kind=kind)
    optimizer: Any = state._optimizer
    for number in range(3):
        torch.manual_seed(number)
        model(torch.randn(8, SIZES[0][0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state.extra["position"] = 12
    with TieredClient(Path(socket), namespace="run", job="job") as client:
        first = [client.go_back(step=0) if rank == 0 else None]
        dist.broadcast_object_list(first)
        client.go_back(step=0, first_generation=first[0])
        saver = Saver(client, num_shards=count_shards(kind, size))
        saver.save(state, step=STEP, generation=first[0] or 0)
    whole = _whole(state)
    dist.barrier()
    dist.destroy_process_group()
    return whole


def load_and_gather(
    rank: int, size: int, folder: str, socket: str, kind: str = "full"
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Load what others have saved, and return the whole tensors and what the load told."""
    _open(rank, size, folder)
    _, state = _make(rank, size, seed=2, kind=kind)
    with TieredClient(Path(socket), namespace="run", job="job") as client:
        (offer,) = whole_steps(client)
        loaded = load(
            client,
            state,
            step=offer.step,
            generation=offer.generation,
            shards=offer.shards,
            num_shards=count_shards(kind, size),
        )
    whole = _whole(state)
    dist.destroy_process_group()
    told = {
        "source": loaded.source,
        "num_bad": loaded.num_bad,
        "extra": state.extra,
        "lr": state._optimizer.param_groups[0]["lr"],
    }
    return whole, told
