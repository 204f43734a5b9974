"""Comparison of the training data that each process has made for itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resilience.errors import StateError
from resilience.frameworks.plain_values import is_plain
from resilience.protection.state import update_digest
from resilience.state.rng import seed_from


def check_data(loader: Any, *, rank: int, world_size: int, device: torch.device) -> None:
    """Raise StateError where the first, middle or last sample differs between processes.

    Called in the set-up by all ranks. The results of a set-up's collectives are kept, so a process
    that joins is compared with the one whose place it takes. Parts of samples that are objects are
    left out. A loader's samples are read where it reads them: a worker may open files of its own.
    """
    if world_size == 1:
        return
    dataset = getattr(loader, "dataset", None)
    own = _digest(dataset, has_workers=getattr(loader, "num_workers", 0) > 0)
    digests = torch.zeros(world_size, dtype=torch.int64, device=device)
    digests[rank] = own
    dist.all_reduce(digests)
    # All ranks say the same of a difference between them: the first that ends speaks for all.
    if own != int(digests[rank]):
        other = "of the process whose place it takes"
    elif differing := (digests != digests[0]).nonzero().flatten().tolist():
        rank, other = differing[0], "of rank 0"
    else:
        return
    raise StateError(
        f"rank {rank} has made other training data, or another order of it, than that {other}; "
        "give a seed to what shuffles or draws, so that each process makes the same"
    )


def _digest(dataset: Any, *, has_workers: bool = False) -> int:
    """Return a number of 63 bits for length and samples; 0 where they are not compared."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not len(dataset):
        return 0
    digests = DataLoader(_Digests(dataset), batch_size=None, num_workers=int(has_workers))
    digest = hashlib.blake2b("/".join(digests).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class _Digests(Dataset[str]):
    """Digests of a dataset's first, middle and last sample."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._indices = (0, len(dataset) // 2, len(dataset) - 1)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> str:
        index = self._indices[number]
        seed_from(f"sample/{index}")
        try:
            sample = self._dataset[index]
        except Exception:  # noqa: BLE001 - a sampler may ask for samples by other keys
            return ""
        parts = [each for each in tree_leaves(sample) if is_plain(each) or type(each) is bytes]
        digest = hashlib.blake2b(digest_size=8)
        update_digest(digest, [len(self._dataset), parts])
        return digest.hexdigest()
