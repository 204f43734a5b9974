"""Megatron's trainer on ranks of its own, saved and loaded: its state by names, as bytes.

Megatron is imported once, by a process that forks the ranks of one world after the other.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from launcher.job import Job
from recipes_training.plan import plan_copy, plan_placement
from resilience.state.shared import SharedState
from resilience.tiered.client import TieredClient
from resilience.tiered.loader import load, whole_steps
from resilience.tiered.saver import Saver
from tests.recipes_training.groups import Quiet, make_group, open_world
from tests.resilience.rank_processes import fork_ranks
from tests.resilience.stores import serve_stores

STEP = 2
NAMESPACE = "run"


@dataclass(frozen=True)
class Found:
    """What one rank came to."""

    parts: Mapping[str, tuple[int, bytes]]
    """By name where its part of the flat whole begins, and the part."""
    loss: float
    """Of the next step."""
    num_padded: int
    """Values of gradient buffers that are nobody's."""


class Rank:
    """A rank's trainer in a world of one node, and its client of the node's daemon."""

    def __init__(self, rank: int, size: int, job: Job, port: int, socket: str) -> None:
        from recipes_training.megatron.trainer import MegatronTrainer

        self._book = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        if rank == 0:
            serve_stores(self._book)
        self._world = open_world(self._book, 0, rank=rank, size=size)
        copy = plan_copy(job, size)
        layout = copy.layout(["node-0"], size)
        self._job, self._placement = job, plan_placement(job.trainer, layout, rank)
        self.num_shards = copy.num_shards
        self.trainer = MegatronTrainer(job, Quiet(), is_restartable=True)
        self.trainer.take_groups(make_group(rank, layout=layout, store=self._world.store))
        self.trainer.fill()
        self.trainer.settle()
        self.client = TieredClient(Path(socket), namespace=NAMESPACE, job="job")

    def compute(self, step: int) -> float:
        """Compute a step of a global batch that is the same in every world."""
        job, place = self._job, self._placement
        generator = torch.Generator().manual_seed(step)
        shape = (job.trainer.global_batch_size, job.data.seq_length + 1)
        rows = torch.randint(job.model.vocab_size, shape, generator=generator)
        own = rows[place.data_rank :: place.data_size]
        micro_batches = own.split(job.trainer.micro_batch_size)
        return float(self.trainer.stepper.compute(list(micro_batches), step=step).loss)

    def take_steps(self) -> None:
        for step in range(STEP):
            self.compute(step)
            self.trainer.stepper.update(0.1)
            self.trainer.settle()

    def save(self) -> None:
        """Save the state, which one rank has begun."""
        self.client.go_back(step=0, first_generation=1)
        Saver(self.client, num_shards=self.num_shards).save(
            self.trainer.view, step=STEP, generation=1
        )

    def load(self) -> None:
        (offer,) = whole_steps(self.client)
        load(
            self.client,
            self.trainer.view,
            step=offer.step,
            generation=offer.generation,
            shards=offer.shards,
            num_shards=self.num_shards,
        )
        self.trainer.settle()

    def moments(self) -> list[torch.Tensor]:
        optimizers = [part.optimizer for part in self.trainer._model.parts]
        return [
            tensor
            for optimizer in optimizers
            for moments in optimizer.state.values()
            for tensor in moments.values()
        ]

    def parts(self) -> dict[str, tuple[int, bytes]]:
        parts = {}
        for each in self.trainer.view.tensors():
            values = each.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            (begin,) = each.begin or (0,)
            parts[each.name] = begin, values
        return parts

    def found(self) -> Found:
        model: Any = self.trainer._model
        buffers = [*model.chunk.buffers, *model.chunk.expert_parallel_buffers]
        padded = sum(each.numel - each.numel_unpadded for each in buffers)
        return Found(self.parts(), self.compute(STEP), padded)


def train_and_save(rank: int, size: int, *place: Any) -> Found:
    """Take steps and save the state."""
    each = Rank(rank, size, *place)
    each.take_steps()
    each.save()
    return each.found()


def load_saved(rank: int, size: int, *place: Any) -> Found:
    """Load what another world has saved."""
    each = Rank(rank, size, *place)
    each.load()
    return each.found()


def adopt_state(rank: int, size: int, *place: Any) -> bool:
    """Return whether the state moves into shared memory as it is, and is there after a step."""
    each = Rank(rank, size, *place)
    before = each.parts()
    shared = SharedState([os.memfd_create("place")])
    is_moved = shared.adopt(each.trainer.view, 0) and each.parts() == before
    # What a moment is a view of would keep the memory that it had.
    is_moved &= all(moment._base is None for moment in each.moments())
    each.take_steps()
    is_trained = each.parts() != before
    return is_moved and is_trained and shared.holds(each.trainer.view.tensors())


def count_overlapping(rank: int, size: int, *place: Any) -> list[int]:
    """Return how many reductions each step has begun in its backward pass, not behind it.

    Before the third one, what such a step has begun is thrown away in its midst, as by a fault.
    """
    each = Rank(rank, size, *place)
    model: Any = each.trainer._model
    begun = [0]

    def count(group: Any) -> None:
        ready, start = group.register_grad_ready, group.start_grad_sync

        def note(*arguments: Any, **options: Any) -> None:
            before = group.start_grad_sync
            group.start_grad_sync = lambda **own: (begun.append(begun.pop() + 1), start(**own))
            try:
                ready(*arguments, **options)
            finally:
                group.start_grad_sync = before

        group.register_grad_ready = note

    for group in model.bucket_groups:
        count(group)
    for step in range(4):
        if step == 2:
            # The stages of a pipeline would wait for the one that stops first.
            if each._job.trainer.num_stages == 1:
                model.core.decoder.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
                with contextlib.suppress(ZeroDivisionError):
                    each.compute(step)
                model.core.decoder.layers[0]._backward_hooks.clear()
            each.trainer.discard()
            begun[-1] = 0
        each.compute(step)
        begun.append(0)
    return begun[:-1]


def adapted_to_a_gpu(rank: int, size: int) -> list[str]:
    """Return what is wrong about the parts that a GPU without Transformer Engine needs, too."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import moe_utils

    from recipes_training.megatron.library import adapt

    adapt(device_type="cuda")
    values = torch.ones(2, 3, requires_grad=True) * 2
    problems = []
    try:
        moe_utils.router_gating_linear(values, torch.ones(4, 3), None, torch.float32)
    except NameError as error:
        problems.append(str(error))
    group = type("Group", (), {"size": lambda _: 1})()
    if layers.reduce_from_tensor_model_parallel_region(values, group=group) is not values:
        problems.append("an expert's output cannot be added to in place")
    return problems


def fork_worlds(
    rank: int, size: int, worlds: Sequence[tuple[Any, int, tuple[Any, ...]]]
) -> list[list[Any]]:
    """Run one world after the other: a target, how many ranks, and its arguments."""
    from recipes_training.megatron import preload_cpu  # noqa: F401

    return [fork_ranks(target, number, *arguments) for target, number, arguments in worlds]
