"""Worlds of real processes over gloo, broken at any time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from resilience.comm.agent_store import AgentStore
from resilience.comm.world import World, forget_world, open_axes
from resilience.errors import BrokenError, GroupOpenError, ResilienceError
from tests.ports import free_ports
from tests.resilience.comm.test_sockets import connect
from tests.resilience.rank_processes import run_ranks
from tests.resilience.stores import open_store, serve_stores

LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=2)
NEVER = timedelta(minutes=10)
"""A test that waits for its end fails."""


class Seat:
    """One rank: a store to talk about the test, and worlds one after the other."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._talk = TCPStore("127.0.0.1", port, timeout=LONG)
        self._ears = TCPStore("127.0.0.1", port, timeout=LONG)

    def world(self, generation: int, **options: Any) -> World:
        """Return a world that all ranks have opened; `timeout` ends a test that hangs."""
        world = self.open(World(device_type="cpu"), generation, **options)
        # A rank that breaks its world ends the opening of those that are slower.
        self.meet(f"opened {generation}")
        return world

    def open(
        self,
        world: World,
        generation: int,
        timeout: timedelta = LONG,
        collective_timeout: timedelta = LONG,
        num_local_ranks: int = 1,
    ) -> World:
        self.group = world.open(
            store=open_store(self._talk, generation),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            collective_timeout=collective_timeout,
            num_local_ranks=num_local_ranks,
        )
        return world

    def tell(self, what: str) -> None:
        self._talk.set(what, "")

    def hear(self, what: str) -> None:
        self._talk.wait([what])

    def break_when(
        self, what: str, world: World, after_s: float = 0, generation: int | None = None
    ) -> threading.Thread:
        """Break the world from a thread of its own once somebody tells.

        With a generation: once gloo has told it in the store of that.
        """
        ears = self._ears if generation is None else open_store(self._ears, generation)

        def watch() -> None:
            with suppress(BrokenError):  # the world's fault was first
                ears.wait([what])
            time.sleep(after_s)
            world.break_now()

        watcher = threading.Thread(target=watch)
        watcher.start()
        return watcher

    def meet(self, name: str) -> None:
        self.tell(f"{name}/{self.rank}")
        for rank in range(self.world_size):
            self.hear(f"{name}/{rank}")


def total(value: float = 1.0) -> float:
    tensor = torch.full((1000,), value)
    dist.all_reduce(tensor)
    return tensor[-1].item()


def send_or_receive(seat: Seat) -> None:
    big = torch.zeros(1 << 22)
    if seat.rank == 1:
        dist.recv(big, 0)
    else:
        dist.send(big, 0)


def wait_in_store(world: World) -> None:
    world.store.wait(["never"], LONG)


def run(scene: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    (port,) = free_ports(1)
    return run_ranks(play, world_size + 1, scene, port, *arguments)[:-1]


def play(rank: int, num_processes: int, scene: Callable[..., Any], port: int, *rest: Any) -> Any:
    """Play a rank of the scene; the last process keeps the store for the others."""
    # The store's server answers nobody while it waits for a resolver.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    world_size = num_processes - 1
    store = TCPStore(
        "127.0.0.1", port, is_master=rank == world_size, timeout=LONG, wait_for_workers=False
    )
    if rank == world_size:
        serve_stores(store)
        store.wait([f"left/{each}" for each in range(world_size)], timedelta(seconds=55))
        return None
    seat = Seat(rank, world_size, port)
    try:
        return scene(seat, *rest)
    finally:
        store.set(f"left/{rank}", "")


# ---- waits that end


def rank_0_stays_away(seat: Seat, wait: str) -> float:
    world = seat.world(0)
    seat.meet("open")
    if seat.rank == 0:
        seat.tell("broken")
        world.break_now()
    else:
        watcher = seat.break_when("broken", world)
        with pytest.raises((RuntimeError, BrokenError)):
            {
                "all_reduce": total,
                "pair": lambda: send_or_receive(seat),
                "store": lambda: wait_in_store(world),
            }[wait]()
        watcher.join()
    seat.world(1)
    return total()


@pytest.mark.parametrize("wait", ["all_reduce", "pair", "store"])
def test_break_ends_every_wait_and_the_next_generation_works(wait: str) -> None:
    assert run(rank_0_stays_away, 3, wait) == [3.0] * 3


def last_never_comes(seat: Seat) -> float:
    world = World(device_type="cpu")
    if seat.rank == seat.world_size - 1:
        seat.tell("broken")
    else:
        watcher = seat.break_when("broken", world)
        with pytest.raises(BrokenError):
            seat.open(world, 0)
        watcher.join()
        with pytest.raises(BrokenError):
            seat.open(world, 0)
    seat.world(1)
    return total()


def test_break_ends_the_opening_of_groups() -> None:
    assert run(last_never_comes, 3) == [3.0] * 3


def last_fails_before_it_connects(seat: Seat, num_generations: int) -> float:
    is_last = seat.rank == seat.world_size - 1
    for generation in range(num_generations):
        world = World(device_type="cpu")
        addresses = [f"0//cpu//0/{rank}" for rank in range(seat.world_size)]
        if is_last:
            # It has told its address, and waits for the others'.
            watcher = seat.break_when(addresses[-1], world, generation=generation)
        else:
            seat.hear(f"failed {generation}")
            # Whoever is to be connected to waits when the others have told theirs.
            told = addresses[1 - seat.rank]
            watcher = seat.break_when(told, world, after_s=0.2, generation=generation)
        with pytest.raises((BrokenError, GroupOpenError)):
            seat.open(world, generation, timeout=NEVER)
        watcher.join()
        if is_last:
            seat.tell(f"failed {generation}")
    seat.world(num_generations)
    return total()


def test_break_ends_the_wait_for_a_rank_that_failed_before_it_connected() -> None:
    # Which of two ranks connects to the other depends on their ports.
    assert run(last_fails_before_it_connects, 3, 3) == [3.0] * 3


def last_does_not_open_axes(seat: Seat) -> list[float]:
    world = seat.world(0)
    if seat.rank == seat.world_size - 1:
        seat.tell("broken")
    else:
        watcher = seat.break_when("broken", world)
        with pytest.raises(BrokenError):
            open_axes((2, 2))
        watcher.join()
    seat.world(1)
    sums = []
    for group in open_axes((2, 2)):
        tensor = torch.tensor([float(seat.rank)])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    return sums


def test_break_ends_the_opening_of_axes_and_the_next_ones_lie_right() -> None:
    assert run(last_does_not_open_axes, 4) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def last_comes_too_late(seat: Seat) -> str:
    if seat.rank == 0:
        return ""
    with pytest.raises(GroupOpenError) as raised:
        seat.open(World(device_type="cpu"), 0, timeout=timedelta(seconds=1))
    return str(raised.value).partition(":")[0]


def test_a_missing_rank_is_waited_for_until_the_deadline() -> None:
    assert run(last_comes_too_late, 2) == ["", "2 ranks did not meet within 1 s"]


# ---- what a break must not touch


def late_break(seat: Seat) -> list[float]:
    old = seat.world(0)
    before = total()
    new = seat.world(1)
    old.break_now()
    after = [total() for _ in range(3)]
    assert not new.is_broken
    return [before, *after]


def test_a_late_break_leaves_the_next_generation_alone() -> None:
    assert run(late_break, 3) == [[3.0] * 4] * 3


def users_sockets(seat: Seat) -> list[bytes]:
    pairs = [connect(), socket.socketpair()]
    world = seat.world(0)
    pairs.append(connect())
    total()
    world.break_now()
    world.break_now()
    received = []
    for one, other in pairs:
        one.sendall(b"x")
        received.append(other.recv(1))
    return received


def test_a_break_leaves_the_users_own_sockets_alone() -> None:
    assert run(users_sockets, 2) == [[b"x"] * 3] * 2


def test_connecting_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")

    with pytest.raises(ResilienceError, match="unset it"):
        World(device_type="cpu").open(
            store=AgentStore(0, pytest.fail), rank=0, world_size=1, timeout=LONG
        )


# ---- many restarts


def restart_often(seat: Seat, num_restarts: int) -> list[int]:
    """Return how many threads and sockets there are more than after the first few."""
    counts = []
    for generation in range(num_restarts):
        world = seat.world(generation, collective_timeout=SHORT)
        groups = open_axes((2, 2), collective_timeout=SHORT)
        # A rank that is still opening its groups would tell of a peer that is gone instead.
        seat.meet(f"open/{generation}")
        absent = generation % seat.world_size
        if seat.rank == absent:
            seat.tell(f"broken/{generation}")
            world.break_now()
        else:
            watcher = seat.break_when(f"broken/{generation}", world)
            works = [
                dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
                for group in [None, *groups]
            ]
            with pytest.raises((RuntimeError, BrokenError)):
                wait_for(works)
            works.clear()
            watcher.join()
        del groups
        forget_world()
        # A send that gloo has forgotten keeps its group until a time-out; then nothing is counted.
        if not any(_lasts(each) for each in threading.enumerate()):
            counts.append(_num_entries("task") + _num_entries("fd"))
    assert len(counts) > 10
    return [max(counts[5:]) - max(counts[:5])]


def _lasts(thread: threading.Thread) -> bool:
    if thread.name == "forget-world":
        thread.join(timeout=0.5)
    return thread.name == "forget-world" and thread.is_alive()


def wait_for(works: list[Any]) -> None:
    for work in works:
        work.wait()
    total()


def _num_entries(of: str) -> int:
    return len(list(Path(f"/proc/self/{of}").iterdir()))


def test_restarts_leave_neither_threads_nor_sockets() -> None:
    growth = run(restart_often, 4, 25)

    assert all(each <= 2 for [each] in growth), growth


def test_process_ends_beside_a_group_that_does_not() -> None:
    """The destructor of gloo's group waits for a send that no peer asks for."""
    program = """
import threading
from resilience.comm.world import drop_groups

class Group:
    def __del__(self):
        threading.Event().wait(120)

drop_groups([Group()])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
