"""Sharded copies come and go, in place: the losses of a run that keeps its number of them.

Two ranks hold a copy. The last process keeps the store; the others are ranks while there are
enough copies, and begin anew after that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.job import Job, read_job
from recipes_training.data.order import Split
from recipes_training.torch.trainer import TorchTrainer
from resilience.state.digest import digest_state
from tests.cases import slow
from tests.recipes_training.groups import Quiet, make_group, open_world
from tests.recipes_training.jobs import GPT_OSS, LLAMA, make_job
from tests.recipes_training.trainer_ranks import connect, run_process
from tests.recipes_training.workers import Workers

NUM_SHARDS = 2
NUM_PROCESSES = 6
SIZES = {"changing": ((2, 0), (1, 2), (3, 4), (2, 6)), "fixed": ((2, 0),)}
"""Copies, and the step from which on there are so many."""
NUM_STEPS = 8
TRAINER = {"global_batch_size": 10, "micro_batch_size": 1, "num_devices": 4}


class Process:
    """A process that is a rank where there are enough copies."""

    def __init__(self, job: Job, number: int, port: int) -> None:
        self.job, self.number, self._book = job, number, connect(port)
        self._trainer: TorchTrainer | None = None
        self.losses: list[str] = []
        self.parts: dict[int, str] = {}
        """Digest of its state at the end of each generation that it was in."""

    def play(self, sizes: Sequence[tuple[int, int]]) -> None:
        for generation, (each, after) in enumerate(pairwise((*sizes, (0, NUM_STEPS)))):
            self._open_and_train(generation, each[0], range(each[1], after[1]))

    def _open_and_train(self, generation: int, copies: int, steps: range) -> None:
        world_size = copies * NUM_SHARDS
        if self.number >= world_size:
            self._trainer = None
            return
        world = open_world(self._book, generation, rank=self.number, size=world_size)
        is_first = self._trainer is None
        trainer = self._trainer or TorchTrainer(self.job, Quiet(), is_restartable=True)
        trainer.take_groups(
            make_group(
                self.number,
                store=world.store,
                world_size=world_size,
                num_local_ranks=NUM_SHARDS,
                num_shards=NUM_SHARDS,
            )
        )
        if is_first:
            trainer.fill()
        trainer.discard()
        self._trainer = trainer
        spread_state(trainer)
        for step in steps:
            self._step(trainer, step, world_size)
        self.parts[generation] = digest_state(trainer.view)
        dist.barrier()
        world.break_now()

    def _step(self, trainer: TorchTrainer, step: int, world_size: int) -> None:
        settings = self.job.trainer
        split = Split(
            global_batch_size=settings.global_batch_size,
            micro_batch_size=settings.micro_batch_size,
            world_size=world_size,
        )
        rows = [make_rows(self.job, step, each) for each in split.micro_batches(self.number)]
        result = trainer.stepper.compute(rows, step=step)
        trainer.stepper.update(1e-3)
        self.losses.append(result.loss.hex())


def make_rows(job: Job, step: int, micro_batch: int) -> Tensor:
    begin = 7 * step + 3 * micro_batch
    return (torch.arange(begin, begin + 9) % job.model.vocab_size).view(1, 9)


def state_of(trainer: TorchTrainer) -> list[Tensor]:
    found: list[Any] = []
    for parameter in trainer._core.parameters():
        found += [parameter, *trainer._optimizer.state[parameter].values()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def spread_state(trainer: TorchTrainer) -> None:
    """Have the other copies hold what the first one holds."""
    group = dist.new_subgroups_by_enumeration(
        [list(range(shard, dist.get_world_size(), NUM_SHARDS)) for shard in range(NUM_SHARDS)]
    )[0]
    with torch.no_grad():
        for each in state_of(trainer):
            dist.broadcast(each, dist.get_global_rank(group, 0), group=group)


def play(job_path: Path, folder: Path, number: int, port: int) -> dict[str, Any]:
    process = Process(read_job(job_path), number, port)
    process.play(SIZES[os.environ["TEST_SIZES"]])
    return {"losses": process.losses, "parts": process.parts}


def main(arguments: list[str]) -> int:
    """Play the part that the number of this process means."""
    return run_process(arguments, "told", play)


@pytest.mark.parametrize("model", [LLAMA, slow(GPT_OSS, id="experts")])
def test_copies_that_come_and_go_leave_the_losses_as_they_are(
    model: dict[str, Any], workers: Workers, tmp_path: Path
) -> None:
    """Ten micro batches: 3, 3, 2 and 2 of four ranks, 5 and 5 of two, 1 or 2 of six."""
    job = make_job(model=model, trainer={**TRAINER, "sharding": "hybrid", "num_replicas": 2})

    told = {}
    for name, sizes in (("fixed", "fixed"), ("changing", "changing"), ("again", "changing")):
        workers.run(
            job,
            tmp_path / name,
            num_workers=NUM_PROCESSES + 1,
            target=f"{__name__}:main",
            variables={"TEST_SIZES": sizes},
        )
        found = [
            json.loads((tmp_path / name / f"told-{number}.json").read_text())
            for number in range(NUM_PROCESSES)
        ]
        told[name] = found

    losses = [[float.fromhex(each) for each in told[name][0]["losses"]] for name in told]
    assert len(losses[0]) == NUM_STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1][0] > losses[1][-1]
    assert told["again"] == told["changing"]
    # The ranks of one shard hold the same bits, those of two do not.
    largest = [each["parts"]["2"] for each in told["changing"]]
    assert largest == [*largest[:NUM_SHARDS] * 3]
    assert largest[0] != largest[1]
