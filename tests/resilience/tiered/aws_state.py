"""What the ranks of AWS's environment save, and ours load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

State = dict[str, Any]


def make_state(rank: int, seed: int) -> State:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    state: State = {
        f"rank{rank}.weight{number}": torch.rand(1 << 18, generator=generator)
        for number in range(4)
    }
    state[f"rank{rank}.half"] = torch.rand(777, generator=generator).to(torch.bfloat16)
    state[f"rank{rank}.step"] = torch.tensor(seed)
    state[f"rank{rank}.rest"] = {"seed": seed, "text": "x" * seed}
    state["shared"] = make_shared(seed)
    return state


def make_shared(seed: int) -> DTensor:
    """Return a tensor whose rows all ranks of this world share out."""
    rows = torch.rand(50, 3, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(rows, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def is_equal(state: State, other: State) -> bool:
    return all(
        torch.equal(plain(value), plain(other[name]))
        if isinstance(value, torch.Tensor)
        else value == other[name]
        for name, value in state.items()
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
