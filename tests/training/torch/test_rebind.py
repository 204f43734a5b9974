"""Steps that end anywhere, run again in the next generation: the bits of an undisturbed one.

The processes are forked from one that has torch; the last but one keeps the store, and the last
takes rank 1's place in the end.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroup, _world
from torch.distributed.tensor import DTensor

from launcher.job import Job
from resilience.comm.world import World
from resilience.errors import BrokenError
from tests.cases import slow
from tests.training.groups import make_group
from tests.training.jobs import GPT_OSS, make_job
from tests.training.workers import Workers
from training.torch.model import SpreadModel, build_core, fill_core, spread_core
from training.torch.rebind import clear_step, take_groups

WORLD_SIZE = 4
NUM_MICRO_BATCHES = 2
LONG = timedelta(seconds=40)
ANYBODY = -1
PLACES = [
    (layer, way, micro_batch)
    for micro_batch in range(NUM_MICRO_BATCHES)
    for layer in (0, 1, ANYBODY)
    for way in ("forward", "backward")
]
"""Where a step ends; the third is the whole model: its head, or its embedding."""
CASES = [(place, number % WORLD_SIZE) for number, place in enumerate(PLACES)] + [
    (place, ANYBODY) for place in PLACES[::3]
]


class InjectedError(Exception):
    """A fault in the training thread."""


class Rank:
    """One rank over many generations."""

    def __init__(self, job: Job, rank: int, port: int) -> None:
        self.job, self.rank, self._port = job, rank, port
        self._talk = connect(port)
        self._ears = connect(port)
        self.model: SpreadModel | None = None
        self._micro_batch = 0
        generator = torch.Generator().manual_seed(rank)
        shape = (NUM_MICRO_BATCHES, 2, 9)
        self._rows = torch.randint(job.model.vocab_size, shape, generator=generator)

    def open(self, generation: int) -> World:
        """Open a generation, and make the model fit for it or make it."""
        world = World(device_type="cpu")
        world.open(
            host="127.0.0.1",
            port=self._port,
            prefix=f"g{generation}",
            rank=self.rank,
            world_size=WORLD_SIZE,
            timeout=LONG,
        )
        if self.model is not None:
            take_groups(self.model)
            clear_step(self.model)
            return world
        core = build_core(self.job, self.job.trainer)
        group = make_group(self.rank, store=world.store, world_size=WORLD_SIZE)
        self.model = spread_core(core, self.job.trainer, self.job.model, group, is_restartable=True)
        fill_core(self.job, core)
        return world

    def step(self) -> str:
        """Run forward and backward; returns the digest of the reduced gradients."""
        assert self.model is not None
        for number, rows in enumerate(self._rows):
            self._micro_batch = number
            with self.model.micro_batch(is_last=number == NUM_MICRO_BATCHES - 1):
                output = self.model.run(input_ids=rows, use_cache=False)
                output.logits.float().logsumexp(-1).mean().backward()
        # As the mean of losses does: nobody is through before all are.
        dist.all_reduce(torch.zeros(1))
        return digest(each.grad for each in self.model.core.parameters())

    def break_step(self, world: World, generation: int, place: Any, culprit: int) -> None:
        """Run a step that the culprit ends at the place, and everybody else when it tells."""
        watcher = threading.Thread(target=self._watch, args=(world, generation))
        watcher.start()
        hooks = self._fault_at(place) if culprit in (self.rank, ANYBODY) else None
        try:
            self.step()
        except (InjectedError, BrokenError, RuntimeError):
            self._talk.set(f"fault/{generation}", "")
        else:
            pytest.fail(f"nothing ended the step at {place}")
        finally:
            for hook in hooks or ():
                hook.remove()
        watcher.join()

    def _watch(self, world: World, generation: int) -> None:
        self._ears.wait([f"fault/{generation}"])
        world.break_now()

    def _fault_at(self, place: Any) -> list[Any]:
        assert self.model is not None
        layer, way, micro_batch = place

        def fail(*_: Any) -> None:
            if self._micro_batch == micro_batch:
                raise InjectedError

        core: Any = self.model.core
        if way == "forward":
            return [
                (
                    core.lm_head if layer == ANYBODY else core.model.layers[layer]
                ).register_forward_hook(fail)
            ]
        at: nn.Module = core.model.embed_tokens if layer == ANYBODY else core.model.layers[layer]
        return [at.register_forward_hook(lambda *x: watch_gradient(x[2], fail))]

    def weights(self) -> str:
        """Return the digest of the whole weights, for which FSDP2 needs its groups."""
        assert self.model is not None
        with torch.no_grad():
            return digest(
                each.full_tensor() if isinstance(each, DTensor) else each
                for each in self.model.core.parameters()
            )

    def part(self) -> str:
        """Return the digest of this rank's part of the weights, for which it needs nobody."""
        assert self.model is not None
        return digest(self.model.core.parameters())

    def tell(self, what: str, text: str) -> None:
        self._talk.set(what, text)

    def hear(self, what: str) -> str:
        return str(self._talk.get(what).decode())


def watch_gradient(output: Any, fail: Any) -> None:
    tensor = output[0] if isinstance(output, tuple) else output
    tensor.register_hook(fail)


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for each in tensors:
        local = each.to_local() if isinstance(each, DTensor) else each
        found.update(local.detach().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def connect(port: int, *, is_master: bool = False) -> TCPStore:
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=is_master,
        timeout=timedelta(seconds=90),
        wait_for_workers=False,
    )


def groups_within(*roots: object) -> set[int]:
    """Return the process groups that can be reached from the objects."""
    seen, found, rest = set(), set(), list(roots)
    while rest:
        each = rest.pop()
        if id(each) in seen or isinstance(each, (ModuleType, type, FrameType)):
            continue
        seen.add(id(each))
        if isinstance(each, ProcessGroup):
            found.add(id(each))
        elif isinstance(each, FunctionType):
            rest += [*(each.__closure__ or ()), *(each.__defaults__ or ())]
        else:
            rest += gc.get_referents(each)
    return found


def live_old_groups(model: SpreadModel) -> int:
    current = {id(each) for each in _world.pg_map}
    return len(groups_within(model) - current)


def take_part(rank: Rank) -> None:
    """Play one of the ranks that are there from the beginning."""
    world = rank.open(0)
    assert rank.model is not None
    expected = rank.step()
    weights, part = rank.weights(), rank.part()
    rank.tell(f"expected/{rank.rank}", expected)
    for generation, (place, culprit) in enumerate(CASES):
        rank.break_step(world, generation, place, culprit)
        clear_step(rank.model)
        assert rank.part() == part, f"ended at {place} by {culprit}: no state to save alone"
        world = rank.open(generation + 1)
        case = f"ended at {place} by {culprit}"
        assert rank.step() == expected, case
    assert rank.weights() == weights
    assert live_old_groups(rank.model) == 0
    world.break_now()
    if rank.rank == 1:
        rank.tell("rank 1 has left", "")
    else:
        rank.open(len(CASES) + 1)
        assert rank.step() == expected
        assert rank.weights() == weights


def replace(rank: Rank) -> None:
    """Play the process that takes rank 1's place for the last generation."""
    rank.hear("rank 1 has left")
    rank.open(len(CASES) + 1)
    assert rank.step() == rank.hear("expected/1")
    rank.weights()


def main(arguments: list[str]) -> int:
    """Play the part that the number of this process means."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path)
    options, _ = parser.parse_known_args(arguments)
    number, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    torch.set_num_threads(1)
    # The store's server answers nobody while it waits for a resolver.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    if number == WORLD_SIZE:
        store = connect(port, is_master=True)
        store.wait([f"left/{each}" for each in range(WORLD_SIZE + 2) if each != number])
        return 0
    job = Job.model_validate_json(options.job.read_text())
    is_fresh = number == WORLD_SIZE + 1
    rank = Rank(job, 1 if is_fresh else number, port)
    replace(rank) if is_fresh else take_part(rank)
    rank.tell(f"left/{number}", "")
    return 0


@pytest.mark.parametrize(
    "parts",
    [
        slow({"trainer": {"num_devices": 4}}, id="copies"),
        pytest.param(
            {"trainer": {"num_devices": 4, "sharding": "hybrid", "num_replicas": 2}}, id="hybrid"
        ),
        slow(
            {
                "model": GPT_OSS,
                "trainer": {
                    "num_devices": 4,
                    "sharding": "hybrid",
                    "num_replicas": 2,
                    "activation_checkpointing": True,
                },
            },
            id="hybrid-experts",
        ),
        slow({"trainer": {"num_devices": 4, "sharding": "full"}}, id="one-copy"),
    ],
)
def test_step_run_again_has_the_bits_of_an_undisturbed_one(
    parts: dict[str, Any], workers: Workers, tmp_path: Path
) -> None:
    workers.run(make_job(**parts), tmp_path, num_workers=WORLD_SIZE + 2, target=f"{__name__}:main")
