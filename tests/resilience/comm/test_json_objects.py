"""Values of all ranks as JSON, between real processes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resilience.comm.json_objects import gather_json
from tests.resilience.rank_processes import run_ranks


def join(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )


def gather_own(rank: int, world_size: int, folder: str) -> list[Any]:
    join(rank, world_size, folder)
    return gather_json({"rank": rank, "text": "\u00e9" * 100 * rank})


def gather_beside_a_pickle(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 sends a pickle that makes a file where it is read."""
    join(rank, world_size, folder)
    if rank == 0:
        with pytest.raises(UnicodeDecodeError):
            gather_json("own")
        return ""
    data = pickle.dumps(Trap(f"{folder}/made"))
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(padded) for _ in sizes], padded)
    return "sent"


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_each_rank_has_the_values_of_all(tmp_path: Path) -> None:
    wanted = [{"rank": rank, "text": "\u00e9" * 100 * rank} for rank in range(3)]

    assert run_ranks(gather_own, 3, str(tmp_path)) == [wanted] * 3


def test_pickle_of_another_rank_is_an_error_and_runs_nothing(tmp_path: Path) -> None:
    assert run_ranks(gather_beside_a_pickle, 2, str(tmp_path)) == ["", "sent"]
    assert not (tmp_path / "made").exists()
