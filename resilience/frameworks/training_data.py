"""Comparison of the training data that each process has made for itself."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from resilience.errors import StateError
from resilience.frameworks.plain_values import is_plain
from resilience.protection.state import update_digest
from resilience.state.rng import seed_from


def check_data(dataset: Any, *, rank: int, world_size: int) -> None:
    """Raise StateError where the first, middle or last sample differs between processes.

    Called in the set-up by all ranks. The results of a set-up's collectives are kept, so a process
    that joins is compared with the one whose place it takes. Samples of other than plain values
    are not compared.
    """
    if world_size == 1:
        return
    digests = torch.zeros(world_size, dtype=torch.int64)
    digests[rank] = own = _digest(dataset)
    dist.all_reduce(digests)
    if own != int(digests[rank]):
        other = "of the process whose place it takes"
    elif differing := (digests != own).nonzero().flatten().tolist():
        other = f"of rank {differing[0]}"
    else:
        return
    raise StateError(
        f"rank {rank} has made other training data, or another order of it, than that {other}; "
        "give a seed to what shuffles or draws, so that each process makes the same"
    )


def _digest(dataset: Any) -> int:
    """Return a number of 63 bits for length and samples; 0 where they are not compared."""
    if isinstance(dataset, IterableDataset) or not len(dataset):
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for index in (0, len(dataset) // 2, len(dataset) - 1):
        seed_from(f"sample/{index}")
        try:
            sample = dataset[index]
        except Exception:  # noqa: BLE001 - a sampler may ask for samples by other keys
            return 0
        parts = [each for each in tree_leaves(sample) if is_plain(each) or type(each) is bytes]
        update_digest(digest, [len(dataset), parts])
    return int.from_bytes(digest.digest(), "big") >> 1
