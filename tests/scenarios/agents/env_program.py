"""Meets the others by `env://` in every way that a program may, and writes what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

IN_CHILD = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1)
dist.all_reduce(tensor)
store = dist.distributed_c10d._get_default_store().underlying_store
print(tensor.item(), type(getattr(store, "underlying_store", store)).__name__)
dist.destroy_process_group()
"""


def meet(**options: object) -> tuple[float, str]:
    """Open a group, sum over it, and destroy it; returns the sum and the kind of its store."""
    dist.init_process_group("gloo", **options)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    store = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    dist.destroy_process_group()
    return tensor.item(), type(store).__name__


rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
found = {"plain": meet()}
found["again"] = meet(init_method="env://")
found["with its rank"] = meet(rank=rank, world_size=size)
child = subprocess.run(
    [sys.executable, "-c", IN_CHILD], capture_output=True, text=True, check=False
)
found["child"] = child.stdout.split() or child.stderr
others = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}  # ranks share a machine
found["of its own"] = meet()
os.environ |= others
Path(os.environ["OUT"], f"found-{rank}").write_text(json.dumps(found))
