"""Runs of several ranks under `Recovery`, whose generations a test ends where it likes.

`Run` plays agent and coordinator: it opens a generation, waits until each rank has
stopped or is where the test wants it, breaks the generation, and opens the next one
with the reports of this one. A rank that is replaced loses its `Worker` and all in it.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import nn

from resilience.checkpointless.recovery import Recovery
from resilience.errors import ResilienceError
from resilience.state.layout import make_layout
from resilience.state.report import fresh_report
from resilience.state.torch_state import TorchState, materialise
from tests.resilience.checkpointless.recovery_channels import TIMEOUT_S

NUM_RANKS = 4
LAYOUTS = {
    name: make_layout(nodes=("node-0", "node-1"), num_local_ranks=2, num_shards=num_shards)
    for name, num_shards in (("2-replicas-x-2-shards", 2), ("4-replicas", 1))
}
MOST_STEPS = 9
LR, NORM_MAX = 0.02, 0.05
ANY = None
"""The step of a place that is within a recovery."""


class InjectedError(Exception):
    """The fault of a test."""


@dataclass(frozen=True)
class Fault:
    """A rank's thread raises where it gets to a place of a step."""

    rank: int
    place: str
    step: int | None = ANY
    is_replaced: bool = False
    """Its process ends with it."""


@dataclass(frozen=True)
class Stance:
    """Where a rank is when its generation is broken."""

    place: str
    step: int | None = ANY
    is_held: bool = False
    """False where it waits for a collective by itself from there on."""


@dataclass
class Control:
    """Lets ranks fail and wait at their places."""

    faults: dict[int, Fault] = field(default_factory=dict)
    stances: dict[int, Stance] = field(default_factory=dict)
    actions: dict[tuple[int, str, int | None], object] = field(default_factory=dict)

    def __post_init__(self):
        self.arrived = {rank: threading.Event() for rank in self.stances}
        self.broken = threading.Event()

    def reach(self, rank, place, step):
        for at in (step, ANY):
            if action := self.actions.pop((rank, place, at), None):
                action()
        if _matches(self.stances.get(rank), place, step):
            self.arrived[rank].set()
            if self.stances[rank].is_held:
                assert self.broken.wait(TIMEOUT_S), f"rank {rank} is left at {place}"
        if _matches(self.faults.get(rank), place, step) and not self.broken.is_set():
            self.await_all()
            raise InjectedError(place)

    def await_all(self):
        for rank, arrived in self.arrived.items():
            assert arrived.wait(TIMEOUT_S), f"rank {rank} never gets to {self.stances[rank]}"


def _matches(wanted, place, step):
    return wanted is not None and wanted.place == place and wanted.step in (step, ANY)


class Worker:
    """What one process holds: a part of a model, its optimizer, and its recovery."""

    def __init__(self, rank, layout, *, self_check=None, work_in_update=None):
        seat = layout.seat(rank)
        self.rank = rank
        self.shard, self.num_shards = seat.shard, layout.num_shards
        self.module = nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=LR)
        materialise(self.optimizer)
        self.state = TorchState(self.module, self.optimizer, replica=seat.replica, shard=self.shard)
        self.recovery = Recovery(
            apply=self.update,
            self_check_every_n_steps=self_check,
            reach=self.reach,
        )
        self.recovery.bind(_WatchedState(self))
        self.work_in_update = work_in_update or (lambda seat: None)
        self.resumed = None
        self.history = {}
        for tensor in self.tensors():
            tensor.fill_(float("nan"))

    def reach(self, place, step):
        self.seat.reach(place, step)

    def tensors(self):
        return [each.tensor for each in self.state.tensors()]

    def run(self, seat, until):
        self.seat, self.resumed = seat, None
        seat.reach("resume", ANY)
        self.resumed = self.recovery.resume(seat, self.start)
        self.note()
        for step in range(self.recovery.mark.step, until):
            self.take_step(seat, step)
            self.note()
        self.recovery.check()

    def note(self):
        self.history[self.recovery.mark.step] = self.snapshot()

    def snapshot(self):
        """Return all bits of the state, and what goes with them."""
        bits = [each.numpy().tobytes() for each in self.tensors()]
        return bits, copy.deepcopy((self.recovery.rest, self.state.read_rest()))

    def start(self, fallback):
        generator = torch.Generator().manual_seed(len(self.shard) + 7 * int(self.shard or 0))
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.zero_()
            for parameter in self.module.parameters():
                parameter.uniform_(-1.0, 1.0, generator=generator)
        self.state.extra.update(num_updates=0)
        return 0

    def take_step(self, seat, step):
        seat.check()
        seat.reach("forward", step)
        self.recovery.begin()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        rows = torch.randn(4, 5, generator=generator)
        loss = (self.module(rows) - rows[:, :3].sin()).square().mean()
        loss.backward()
        sums = [self.spread(each.grad) for each in self.module.parameters()]
        seat.reach("reducing-0", step)
        seat.all_reduce(sums[0])
        seat.reach("half", step)
        seat.reach("reducing-1", step)
        seat.all_reduce(sums[1])
        seat.enqueue(lambda: self.take_gradients(sums))
        seat.finish()
        seat.reach("reduced", step)
        self.recovery.pending = {"step": step, "norm": self.norm}
        with self.recovery.commit(seat):
            self.update(step)

    def spread(self, gradient):
        """Return room for every shard's gradient, with this rank's in its place."""
        room = torch.zeros(self.num_shards, *gradient.shape)
        room[int(self.shard or 0)] = gradient
        return room

    def take_gradients(self, sums):
        """Scale and clip by the norm over all shards, so that each depends on every rank."""
        norm = sum(each.square().sum() for each in sums).sqrt()
        for parameter, each in zip(self.module.parameters(), sums, strict=True):
            own = each[int(self.shard or 0)]
            parameter.grad = own * self.num_shards / NUM_RANKS * (NORM_MAX / norm).clamp(max=1.0)
        self.norm = norm.item()

    def update(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        self.work_in_update(self.seat)
        self.optimizer.step()
        self.seat.reach("in_update", step)
        self.state.extra["num_updates"] += 1


class _WatchedState:
    """A state with a place where it has arrived, and the rest has not."""

    def __init__(self, worker):
        self._worker = worker

    def __getattr__(self, name):
        return getattr(self._worker.state, name)

    def write_rest(self, rest):
        self._worker.seat.reach("received", ANY)
        self._worker.state.write_rest(rest)


class Run:
    """Ranks over generations. `channels` makes what those of one generation communicate over."""

    def __init__(self, channels, layout, *, seed=0, **options):
        self.channels = channels
        self.layout = layout
        self.make_worker = functools.partial(Worker, layout=LAYOUTS[layout], **options)
        self.workers = [self.make_worker(rank) for rank in range(NUM_RANKS)]
        self.random = random.Random(seed)
        self.number = 0
        self.reports = [fresh_report(LAYOUTS[layout], rank, -1) for rank in range(NUM_RANKS)]

    def play(self, until, faults=(), stances=None, actions=None):
        """Run one generation, and return how each rank came to its first step (None: not).

        Without faults it ends by itself, all ranks at step `until`.
        """
        control = Control({each.rank: each for each in faults}, stances or {}, actions or {})
        seed = self.random.getrandbits(32)
        world = self.channels(
            self.number, LAYOUTS[self.layout], self.reports, control.reach, seed=seed
        )
        with closing(world):
            threads = [_RankThread(world, each, until) for each in self.workers]
            for each in threads:
                each.start()
            if faults:
                self._break(world, control, threads)
            for each in threads:
                each.end()
                is_raised = each.error is not None
                assert is_raised == bool(faults), f"rank {each.rank}: {each.error!r}"
            world.settle()
        self.errors = [each.error for each in threads]
        resumed = [each.resumed for each in self.workers]
        self._replace({each.rank for each in faults if each.is_replaced})
        self.number += 1
        return resumed

    def _break(self, world, control, threads):
        for rank in control.faults:
            threads[rank].end()
            error = threads[rank].error
            assert isinstance(error, (InjectedError, ResilienceError)), error
        control.await_all()
        for rank, stance in control.stances.items():
            if not stance.is_held:
                world.await_blocked(rank, stance.place)
        world.break_all(self.random.sample(range(NUM_RANKS), NUM_RANKS))
        control.broken.set()

    def _replace(self, ranks):
        """Collect the reports: of a process that has ended, its agent knows nothing more."""
        self.reports = []
        for rank, worker in enumerate(self.workers):
            if rank in ranks:
                self.reports.append(fresh_report(LAYOUTS[self.layout], rank, self.number))
                self.workers[rank] = self.make_worker(rank)
            else:
                self.reports.append(
                    worker.recovery.report(
                        rank=rank, node=f"node-{rank // 2}", generation=self.number
                    )
                )


class _RankThread(threading.Thread):
    def __init__(self, world, worker, until):
        super().__init__(name=f"rank-{worker.rank}", daemon=True)
        self.rank = worker.rank
        self.error = None
        self._arguments = world, worker, until

    def run(self):
        world, worker, until = self._arguments
        seat = world.seats[self.rank]
        worker.recovery.enter(seat)
        try:
            worker.run(world.sit_down(self.rank), until)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def end(self):
        self.join(TIMEOUT_S)
        assert not self.is_alive(), f"rank {self.rank} hangs"


@functools.cache
def undisturbed(channels, layout, num_steps):
    """Return each rank's state at each step of a run without faults."""
    run = Run(channels, layout)
    run.play(num_steps)
    return [worker.history for worker in run.workers]


def assert_undisturbed(run, num_steps):
    """Check that every state of every rank, at whatever step, has the bits of that run."""
    expected = undisturbed(run.channels, run.layout, MOST_STEPS)
    for worker, history in zip(run.workers, expected, strict=True):
        assert worker.recovery.mark.step == num_steps
        for step, found in worker.history.items():
            assert found == history[step], f"rank {worker.rank} at step {step}"
