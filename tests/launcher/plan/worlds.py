"""Worlds of which this process is rank 0 and the others are not there: collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.composition.compose import resolve
from launcher.job import Job
from launcher.paths import shipped_folder
from recipes_training.group import WorkerGroup

LLAMA, GPT_OSS = "llama/llama3_tiny_pretrain", "gpt_oss/gpt_oss_tiny_pretrain"
CPU = torch.device("cpu")


def job_of(recipe: str, *overrides: str) -> Job:
    one_node = ("trainer.num_nodes=1", "resilience.tiered=null")
    return resolve(recipe, [*one_node, *overrides], shipped_folder())


@contextmanager
def world_of(job: Job, backend: str = "fake") -> Iterator[WorkerGroup]:
    """Open a world of the job's size, of which this process is rank 0."""
    size = job.trainer.world_size
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        yield cast("WorkerGroup", SimpleNamespace(rank=0, world_size=size, device=CPU))
    finally:
        dist.destroy_process_group()
