"""What a conversion makes, and its way to the disk."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recipes_training.errors import CheckpointError
from recipes_training.group import WorkerGroup
from recipes_training.weights.export import clear_drafts, write_model
from resilience.state.layout import make_layout

FILE_BYTES_MAX = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A model in Hugging Face's layout, of which nothing is in memory yet."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors, in the order in which they are written."""
    dtype: torch.dtype
    gather: Callable[[str], Tensor]
    """Reads one tensor."""
    config: Any
    """The model's, of transformers."""
    beside: tuple[Path, ...] = ()
    """Files that go along."""

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors."""
        return sum(self._sizes().values())

    def write(self, target: Path) -> None:
        """Write a folder that is not there; it appears when it is whole. Raises TrainingError."""
        clear_drafts(target)
        self._check_room(target)
        self.config.update({"dtype": self.dtype})
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write {target}: {error}") from error
        layout = make_layout(nodes=["node-0"], num_local_ranks=1, num_shards=1)
        alone = WorkerGroup(
            rank=0,
            layout=layout,
            generation=0,
            node="node-0",
            device=torch.device("cpu"),
            store=HashStore(),
        )
        write_model(
            target,
            sizes=self._sizes(),
            gather=self.gather,
            config=self.config,
            group=alone,
            file_bytes_max=FILE_BYTES_MAX,
            beside=self.beside,
            is_replacing=False,
        )

    def _check_room(self, target: Path) -> None:
        """Refuse at once what a disk would refuse after hours."""
        there = next(each for each in target.absolute().parents if each.exists())
        if (free := shutil.disk_usage(there).free) < self.num_bytes:
            raise CheckpointError(
                f"cannot write {target}: it takes {self.num_bytes:,} bytes, and {there} has "
                f"{free:,} free"
            )

    def _sizes(self) -> dict[str, int]:
        return {name: math.prod(shape) * self.dtype.itemsize for name, shape in self.shapes.items()}
