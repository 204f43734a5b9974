"""Hands a worker its part of each global batch, from mapped files where the recipe has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.job import TrainingJob
from launcher.job.lineage import name_run
from recipes_training.data.position import Position
from recipes_training.data.rank_batches import RankBatches
from recipes_training.data.tokens import Samples
from recipes_training.plan import Placement, plan_split
from resilience.events import EventLog

if TYPE_CHECKING:
    from resilience.data import CachedLoader


_START_S = 5.0
"""How long a producer of batches may take to start before its worker waits for it."""


class Batches:
    """This worker's part of each global batch, read as it is asked for. One thread."""

    def __init__(self, read: Callable[[int], NDArray[np.int64]]) -> None:
        self._read = read

    def read(self, step: int) -> list[Tensor]:
        """Return the rows of tokens of each micro batch, shape (samples, sequence + 1)."""
        return list(torch.from_numpy(self._read(step)).unbind())

    def note_checkpoint(self, step: int) -> None:
        """Take note that a run which loses every copy of its state begins with this step again."""

    def leave(self) -> None:
        """Leave them to whoever has the rank from now on."""

    def close(self) -> None:
        """Leave nothing behind: the run is over."""


def open_batches(
    job: TrainingJob,
    samples: Samples,
    placement: Placement,
    *,
    first: int,
    position: Position,
    run_dir: Path,
    owner_pid: int,
    events: EventLog,
    on_wait: Callable[[], None] | None = None,
    waits_at_first: bool = True,
) -> Batches:
    """Return the batches of one rank, the first of which is to be that of step `first`.

    `position` says which samples the steps take.

    `owner_pid` is the process that outlives the worker: what is made ahead ends with it.
    `on_wait` shows that the worker still waits, and may raise to end that. Who waits not even at
    first reads by itself what is not made ahead yet.
    """
    settings = job.resilience.batches
    split = plan_split(job, placement.data_size, position)
    batches = RankBatches(samples, seed=job.trainer.seed, split=split, rank=placement.data_rank)
    if settings is None:
        return Batches(batches.read)
    # Here, as a run without the feature imports nothing of it.
    from recipes_training.data.batches import make_identity, make_source
    from resilience.data import cached

    loader = cached(
        make_source(job, samples, position),
        settings,
        identity=make_identity(job, samples, position),
        job=f"{job.name}-{name_run(run_dir)}",
        samples_per_batch=job.trainer.global_batch_size,
        samples_consumed=first * job.trainer.global_batch_size,
        rank=placement.data_rank,
        size=placement.data_size,
        owner_pid=owner_pid,
        events=events,
        on_wait=on_wait,
    )
    events.write("batches_ready", step=first, num_batches=loader.count_ready())
    return CachedBatches(loader, None if waits_at_first else batches)


class CachedBatches(Batches):
    """Batches that another process makes ahead: the rows are all that they hold.

    While that process starts, the worker reads `until_ready` where it has that: the others that
    train would wait, and at each change of a run's size, since each rank has another part then.
    After a few seconds it waits for the other process, which says why it has none.
    """

    def __init__(self, loader: CachedLoader, until_ready: RankBatches | None) -> None:
        super().__init__(self._read_step)
        self._loader = loader
        self._until_ready = until_ready
        self._until_s = time.monotonic() + _START_S

    def _read_step(self, step: int) -> NDArray[np.int64]:
        if self._until_ready is not None:
            if time.monotonic() < self._until_s and not self._loader.is_ready(step):
                return self._until_ready.read(step)
            self._until_ready = None
        rows: NDArray[np.int64] = next(iter(self._loader.read(step).values()))
        return rows

    def note_checkpoint(self, step: int) -> None:
        """Let the other process drop what no resume needs."""
        self._loader.note_checkpoint(step)

    def leave(self) -> None:
        """Leave the files and their process to others."""
        self._loader.close()

    def close(self) -> None:
        """Remove the files, with the last who has them."""
        self._loader.close(is_over=True)
