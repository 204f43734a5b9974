"""The trainer of a recipe, each of whose micro batches takes longer by a sleep.

    python -m benchmarks.recovery_peers.slow_trainer --job JOB --run-dir DIR --node-name NAME

The command line of `python -m recipes_training`; BENCHMARK_SLEEP_S says how long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import partial

from launcher.job import Job
from recipes_training.__main__ import run_and_exit
from recipes_training.trainer import StepWatch, Trainer

SLEEP_VARIABLE = "BENCHMARK_SLEEP_S"


class SlowWatch:
    """A `recipes_training.trainer.StepWatch` that sleeps before each forward pass."""

    def __init__(self, watch: StepWatch, sleep: Callable[[], None]) -> None:
        self._watch = watch
        self._sleep = sleep

    @property
    def places(self) -> Collection[str]:
        """Return those of the other watch."""
        return self._watch.places

    def requests(self) -> int:
        """Return that of the other watch."""
        return self._watch.requests()

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        """Tell the other watch, and sleep."""
        self._watch.forward(micro_batch, is_last=is_last)
        self._sleep()

    def backward(self, micro_batch: int) -> None:
        """Tell the other watch."""
        self._watch.backward(micro_batch)

    def reach(self, place: str) -> None:
        """Tell the other watch."""
        self._watch.reach(place)


def make_slow(job: Job, watch: StepWatch, *, is_restartable: bool) -> Trainer:
    """Make the trainer of plain PyTorch with a slow watch."""
    from recipes_training.torch.trainer import TorchTrainer

    slow = SlowWatch(watch, partial(time.sleep, float(os.environ[SLEEP_VARIABLE])))
    return TorchTrainer(job, slow, is_restartable=is_restartable)


if __name__ == "__main__":
    run_and_exit(make_slow)
