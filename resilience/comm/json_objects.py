"""Objects of all ranks as JSON: no rank unpickles what another one has sent."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of each rank of the group, read back from JSON; a collective.

    Raises TypeError for what JSON has no form for, ValueError where a rank sent no JSON.
    """
    is_cuda = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    own = torch.tensor([text.numel()], device=device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    padded = torch.zeros(max(int(each) for each in sizes), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [
        json.loads(bytes(each[: int(size)].tolist()))
        for each, size in zip(texts, sizes, strict=True)
    ]
