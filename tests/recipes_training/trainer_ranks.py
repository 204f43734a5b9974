"""What each rank does in the contract of trainers: a target for processes forked as workers.

Every rank goes through generations in its own process. The last process only hosts the store.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ProcessGroup, _world

from launcher.job import read_job
from recipes_training.__main__ import choose_trainer
from recipes_training.plan import plan_copy, plan_placement
from recipes_training.torch.trainer import TorchTrainer
from recipes_training.trainer import Trainer
from resilience.comm.forbid import forbid_collectives
from resilience.comm.world import World
from resilience.errors import BrokenError
from resilience.state.digest import digest_state
from resilience.state.shared import SharedState
from tests.recipes_training.groups import LONG, make_group, open_world
from tests.recipes_training.toy import ToyTrainer
from tests.resilience.stores import serve_stores

LR = 1e-3
TRAINERS: dict[str, Any] = {"torch": TorchTrainer, "toy": ToyTrainer}
ABORTS = [
    ("forward", 1),
    ("backward", 1),
    ("forward", 2),
    ("backward", 2),
    ("in backward", 2),
    ("in reduction", 2),
]
"""Where a step is ended, and in which micro batch."""
OF_LAYERS = [
    (f"in {way} of layer {layer}", micro_batch)
    for micro_batch in (1, 2)
    for layer in (0, 1)
    for way in ("forward", "backward")
]
"""Further places in which a rank of the torch trainer is ended."""
EVERYBODY = -1


class InjectedError(Exception):
    """A fault in the training thread."""


@dataclass
class Watch:
    """Ends a step where it is told to, and notes what it was told."""

    rank: int
    places: Collection[str] = ("backward", "reduction", "within_update", "settle")
    fails_at: tuple[str, int] | None = None
    told: list[str] = field(default_factory=list)
    micro_batch: int = 0

    def requests(self) -> int:
        return 1 << self.rank

    def forward(self, micro_batch: int, *, is_last: bool) -> None:
        self.micro_batch = micro_batch
        self._tell("forward", micro_batch)

    def backward(self, micro_batch: int) -> None:
        # A pipeline's stage may have begun other forward passes since.
        self._tell("backward", micro_batch)

    def reach(self, place: str) -> None:
        self._tell(f"in {place}", self.micro_batch)

    def _tell(self, place: str, micro_batch: int) -> None:
        self.told.append(place)
        if self.fails_at == (place, micro_batch):
            raise InjectedError


class Rank:
    """One rank's trainer over generations."""

    def __init__(self, kind: str, job_path: Path, rank: int, size: int, port: int) -> None:
        self.rank, self.size = rank, size
        self.is_torch = kind == "torch"
        self.job = read_job(job_path)
        self.watch = Watch(rank)
        make = TRAINERS.get(kind) or choose_trainer(self.job)
        self.trainer: Trainer = make(self.job, self.watch, is_restartable=True)
        self._talk, self._ears = connect(port), connect(port)
        self._number = -1

    def open(self) -> World:
        """Open the next generation and hand its groups to the trainer."""
        self._number += 1
        world = open_world(self._talk, self._number, rank=self.rank, size=self.size)
        layout = plan_copy(self.job, self.size).layout(["node-0"], self.size)
        self._data_rank = plan_placement(self.job.trainer, layout, self.rank).data_rank
        self.trainer.take_groups(
            make_group(self.rank, layout=layout, generation=self._number, store=world.store)
        )
        if self.is_torch and self._number == 0:
            self._watch_layers()
        return world

    def _watch_layers(self) -> None:
        """Tell the watch when each layer's forward has ended and when its backward begins."""
        core: Any = self.trainer._core  # type: ignore[attr-defined]
        for number, layer in enumerate(core.model.layers):

            def tell(_: Any, __: Any, output: Any, number: int = number) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                self.watch.reach(f"forward of layer {number}")
                tensor.register_hook(lambda _: self.watch.reach(f"backward of layer {number}"))

            layer.register_forward_hook(tell)

    def places(self) -> list[tuple[tuple[str, int], int]]:
        """Return where steps are ended, each with the rank that ends it."""
        places = [*ABORTS, *(OF_LAYERS if self.is_torch else ())]
        in_turn = [(place, number % self.size) for number, place in enumerate(places)]
        return in_turn + [(place, EVERYBODY) for place in places[::3] if self.is_torch]

    def count_old_groups(self) -> int:
        """Return how many groups of earlier generations the torch trainer's model holds."""
        if not self.is_torch:
            return 0
        current = {id(each) for each in _world.pg_map}
        return len(groups_within(self.trainer._model) - current)  # type: ignore[attr-defined]

    def digest(self) -> str:
        return digest_state(self.trainer.view)

    def compute(self, step: int) -> Any:
        generator = torch.Generator().manual_seed(100 * step + self._data_rank)
        shape = (2, 2, self.job.data.seq_length + 1)
        rows = torch.randint(self.job.model.vocab_size, shape, generator=generator)
        return self.trainer.stepper.compute(list(rows), step=step)

    def compute_part(self, step: int) -> list[str]:
        """Compute a step; returns what it came to, and what this rank alone gave to it."""
        result = self.compute(step)
        numbers = [result.loss, result.grad_norm, *self.trainer.stepper.part()]
        return [each.hex() for each in numbers]

    def take_step(self, step: int) -> list[Any]:
        """Take a step as the loop does; returns what it came to."""
        result = self.compute(step)
        with forbid_collectives():
            self.trainer.stepper.update(LR)
        self.trainer.settle()
        return [result.loss.hex(), result.grad_norm.hex(), result.requests, self.digest()]

    def begin_anew(self) -> str:
        """Make the first state, after whatever there was."""
        self.trainer.fill()
        self.trainer.discard()
        self.trainer.settle()
        return self.digest()

    def abort(self, world: World, place: tuple[str, int], culprit: int) -> None:
        """Run a step that one rank ends at the place, and all others when they hear of it."""
        topic = f"fault/{self._number}"
        watcher = threading.Thread(target=self._watch_for, args=(topic, world))
        watcher.start()
        self.watch.fails_at = place if culprit in (self.rank, EVERYBODY) else None
        try:
            self.compute(0)
        except (InjectedError, BrokenError, RuntimeError):
            self._talk.set(topic, "")
        else:
            raise AssertionError(f"nothing ended the step at {place}")
        finally:
            self.watch.fails_at = None
        watcher.join()
        self.trainer.discard()

    def _watch_for(self, topic: str, world: World) -> None:
        self._ears.wait([topic])
        world.break_now()

    def meet(self) -> None:
        """Return when all ranks are here; once a generation.

        One rank may have opened it, or ended a collective, before another has.
        """
        topic = f"met/{self._number}"
        self._talk.set(f"{topic}/{self.rank}", "")
        self._talk.wait([f"{topic}/{rank}" for rank in range(self.size)])


def connect(port: int, *, is_master: bool = False) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=is_master, timeout=LONG, wait_for_workers=False)


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


def take_part(rank: Rank, folder: Path) -> dict[str, Any]:
    """Go through the contract; returns what the test looks at."""
    world = rank.open()
    found: dict[str, Any] = {"first": rank.begin_anew(), "again": rank.begin_anew()}
    found["shard"] = rank.trainer.view.shard
    found["names"] = [each.name for each in rank.trainer.view.tensors()]
    found["undisturbed"] = [rank.take_step(step) for step in range(3)]
    rank.trainer.settle()
    found["settled twice"] = rank.digest()
    found["parts"] = [rank.compute_part(3), rank.compute_part(3)]
    found["told"] = sorted(each for each in set(rank.watch.told) if " of layer " not in each)
    found["first after steps"] = rank.begin_anew()
    for place, culprit in rank.places():
        rank.meet()
        rank.abort(world, place, culprit=culprit)
        # Each rank's part is a state that it could save alone.
        assert rank.digest() == found["first"], f"ended at {place} by {culprit}"
        world = rank.open()
        rank.trainer.settle()
    found["after aborts"] = [rank.take_step(step) for step in range(3)]
    found["old groups"] = rank.count_old_groups()
    # A gate has been passed: the update is ended in the next generation, from gradients kept.
    rank.begin_anew()
    result = rank.compute(0)
    rank.meet()
    world.break_now()
    rank.open()
    with forbid_collectives():
        rank.trainer.stepper.update(LR)
    rank.trainer.discard()
    rank.trainer.settle()
    rest = [rank.take_step(step) for step in (1, 2)]
    first = [result.loss.hex(), result.grad_norm.hex(), result.requests]
    found["rolled forward"] = [first, *rest]
    shared = SharedState([os.memfd_create("state")])
    found["is moved"] = shared.adopt(rank.trainer.view, 0)
    rank.begin_anew()
    found["after the move"] = [rank.take_step(step) for step in range(3)]
    rank.trainer.stepper.corrupt("parameter")
    found["corrupt parameter"] = rank.digest() != found["after the move"][-1][-1]
    rank.trainer.export(folder / "model")
    return found


def run_process(arguments: list[str], file: str, play: Callable[..., Any]) -> int:
    """Keep the store, as the last process does, or write what this one's part came to.

    `play` is given the job's path, the run's folder, this process's number and the store's port.
    """
    job_path, folder = (Path(each.partition("=")[2]) for each in arguments[:2])
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    port = int(os.environ["MASTER_PORT"])
    torch.set_num_threads(1)
    # The store's server answers nobody while it waits for a resolver.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    store = connect(port, is_master=number == size)
    if number == size:
        serve_stores(store)
        store.wait([f"left/{rank}" for rank in range(size)])
        return 0
    (folder / f"{file}-{number}.json").write_text(json.dumps(play(job_path, folder, number, port)))
    store.set(f"left/{number}", "")
    return 0


def main(arguments: list[str]) -> int:
    """Play the part that the number of this process means."""

    def play(job_path: Path, folder: Path, number: int, port: int) -> dict[str, Any]:
        size = int(os.environ["WORLD_SIZE"]) - 1
        return take_part(Rank(os.environ["TEST_TRAINER"], job_path, number, size, port), folder)

    return run_process(arguments, "found", play)
