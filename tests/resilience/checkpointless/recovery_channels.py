"""What the ranks of one generation communicate over in the recovery suite.

Ranks are threads. `GlooChannels` gives each a real gloo group; `AsyncChannels` gives it
queues that run on over garbage when they are aborted, as those of an accelerator do.
Both break a generation while they hold the locks, as `resilience.comm.world` does.
"""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from resilience.comm.gate import Gate, GroupChannel
from resilience.comm.page import Activity
from resilience.comm.sockets import open_sockets, shut_down, sockets_since
from resilience.comm.waits import wait_in_slices
from resilience.errors import BrokenError
from resilience.testing.async_group import AsyncChannel, AsyncWorld
from tests.resilience.checkpointless.async_messages import MessageWorld

TIMEOUT_S = 50
_kept = []


class Seat:
    """One rank's place in one generation: the `Members` of its recovery, and its gradients."""

    def __init__(self, number, rank, layout, reports, reach):
        self.number = number
        self.rank = rank
        self.layout = layout
        self.reports = reports
        self.before = None
        self.keeps_state = reports[rank].member_generation == reports[rank].generation
        self.is_passing = False
        self.lock = threading.Lock()
        self.reach = reach
        self.is_broken = False

    def is_current(self):
        return not self.is_broken

    def check(self):
        if self.is_broken:
            raise BrokenError("the generation was ended")

    def mark(self, activity, step, micro_batch=0):
        self.step = step
        if activity is not Activity.UPDATE:
            self.check()


class Watched:
    """The gate's channel and the group of the transfers, with places where faults come in."""

    def __init__(self, inner, seat, *, allreduce=None):
        self._inner = inner
        self._seat = seat
        self._allreduce = allreduce

    def allreduce(self, tensors):
        self._seat.reach("waiting", None)
        return self._allreduce(tensors)

    def reduce(self, buffer):
        self._seat.reach("entering", self._seat.step)
        self._inner.reduce(buffer)
        self._seat.reach("summed", self._seat.step)

    def send(self, tensors, peer, tag):
        self._seat.reach("sending", None)
        return self._inner.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self._seat.reach("receiving", None)
        return self._inner.recv(tensors, peer, tag)


class _Waited:
    """A gloo group whose waits end with the generation, as `resilience.comm.world` has them."""

    def __init__(self, group, seat):
        self._group = group
        self._seat = seat

    def allreduce(self, tensors):
        work, seat = self._group.allreduce(tensors), self._seat
        return SimpleNamespace(wait=lambda: wait_in_slices(work, lambda: seat.is_broken))


class GlooChannels:
    """A gloo group for each thread; all connections of the generation are shut down at once."""

    is_costly = True
    ranks = (1,)
    """Where one rank has to stand for all."""

    def __init__(self, number, layout, reports, reach, *, seed):
        world_size = layout.world_size
        self._before = open_sockets()
        self._store = dist.HashStore()
        self._world_size = world_size
        self.seats = [
            Seat(number, rank, layout, reports, functools.partial(reach, rank))
            for rank in range(world_size)
        ]

    def sit_down(self, rank):
        """Open this rank's group; called by its thread."""
        seat = self.seats[rank]
        group = open_gloo(self._store, rank, self._world_size)
        waited = _Waited(group, seat)
        seat.group = Watched(group, seat, allreduce=waited.allreduce)
        seat.open_group = lambda: group
        channel = Watched(GroupChannel(waited), seat)
        seat.gate = Gate(channel, world_size=self._world_size)
        seat.works, seat.queued = [], []
        seat.all_reduce = lambda buffer: seat.works.append(waited.allreduce([buffer]))
        seat.enqueue = lambda work: seat.queued.append(work)  # noqa: PLW0108 - the list changes
        seat.finish = functools.partial(self._finish, seat)
        return seat

    @staticmethod
    def _finish(seat):
        works, queued, seat.works, seat.queued = seat.works, seat.queued, [], []
        for work in works:
            work.wait()
        for work in queued:
            work()

    def await_blocked(self, rank, place):
        """Return once a rank that has told so may be in its collective."""

    def break_all(self, ranks):
        with ExitStack() as locks:
            for rank in ranks:
                locks.enter_context(self.seats[rank].lock)
                self.seats[rank].is_broken = True
            shut_down(sockets_since(self._before))

    def settle(self):
        """Return once nothing of this generation writes any more."""

    def close(self):
        """Keep the groups until the process is killed.

        To destroy one waits for a send that no peer has asked for until its time-out.
        """
        _kept.append(self.seats)


class AsyncChannels:
    """Queues for the gradients, others for the gate, and messages."""

    is_costly = False
    ranks = (0, 1, 2, 3)
    garbage = "random"
    gate = Gate

    def __init__(self, number, layout, reports, reach, *, seed):
        world_size = layout.world_size
        self._gradients = AsyncWorld(world_size, seed=seed, garbage=self.garbage)
        self._gates = AsyncWorld(world_size, seed=seed + 1, garbage=self.garbage)
        self._messages = MessageWorld(world_size, seed=seed)
        self._world_size = world_size
        self.seats = [
            Seat(number, rank, layout, reports, functools.partial(reach, rank))
            for rank in range(world_size)
        ]

    def sit_down(self, rank):
        seat, group = self.seats[rank], self._gradients.groups[rank]
        inner = AsyncChannel(self._gates.groups[rank], timeout_s=TIMEOUT_S)
        seat.group = Watched(
            self._messages.groups[rank],
            seat,
            allreduce=lambda tensors: SimpleNamespace(wait=lambda: inner.reduce(tensors[0])),
        )
        seat.open_group = lambda: open_gloo(dist.HashStore(), 0, 1)
        channel = Watched(inner, seat)
        seat.gate = self.gate(channel, world_size=self._world_size)
        seat.all_reduce = group.all_reduce
        seat.enqueue = group.enqueue
        seat.finish = functools.partial(self._finish, seat, group)
        return seat

    @staticmethod
    def _finish(seat, group):
        group.synchronize(TIMEOUT_S)
        # What torch's watchdog tells after an abort: the queue itself ends like any other.
        with seat.lock:
            seat.check()

    def await_blocked(self, rank, place):
        """Return once the rank's queue waits for another's."""
        if place.startswith("reducing"):
            self._gradients.groups[rank].wait_until_waiting(TIMEOUT_S)
        elif place in ("entering", "waiting"):
            self._gates.groups[rank].wait_until_waiting(TIMEOUT_S)

    def break_all(self, ranks):
        for rank in ranks:
            with self.seats[rank].lock:
                self.seats[rank].is_broken = True
                for world in (self._gates, self._gradients, self._messages):
                    world.groups[rank].abort()

    def settle(self):
        for group in (*self._gates.groups, *self._gradients.groups):
            group.synchronize(TIMEOUT_S)

    def close(self):
        for world in (self._gates, self._gradients):
            world.__exit__()
        for seat in self.seats:
            seat.__dict__.clear()


class StaleChannels(AsyncChannels):
    """An aborted collective leaves what the last whole one of its shape left."""

    garbage = "stale"


class NaiveGate:
    """Takes any end of its collective for a pass: it holds no lock and counts nobody."""

    def __init__(self, channel, *, world_size):
        self._channel = channel

    def enter(self, step, *, lock, is_current, place=""):
        self._channel.reduce(torch.tensor([1, step, step**2]))


class NaiveChannels(AsyncChannels):
    gate = NaiveGate


def open_gloo(store, rank, world_size):
    """Return a ProcessGroup, not the bare backend: the guard of the update sees no other."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    backend = dist.ProcessGroupGloo(store, rank, world_size, options)
    group = dist.ProcessGroup(store, rank, world_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group
