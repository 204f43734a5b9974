"""Sums and messages over leaders, where torch's default group takes no tensors in host memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.testing._internal.distributed.fake_pg

from resilience.comm.gate import Gate, GroupChannel
from resilience.comm.leaders import LEADERS_MAX, find_groups
from resilience.comm.sockets import open_sockets, sockets_since
from resilience.comm.world import World
from resilience.errors import BrokenError
from tests.resilience.comm.test_world import Seat, run


@pytest.mark.parametrize("num_local_ranks", [1, 2, 8])
@pytest.mark.parametrize("num_nodes", [1, 2, 33, 1024])
def test_each_rank_but_the_first_has_one_leader(num_nodes: int, num_local_ranks: int) -> None:
    world_size = num_nodes * num_local_ranks
    groups = [
        find_groups(rank, world_size=world_size, num_local_ranks=num_local_ranks)
        for rank in range(world_size)
    ]

    led = Counter(rank for rank, own in enumerate(groups) for each in own if each[0] != rank)
    assert led == dict.fromkeys(range(1, world_size), 1)
    assert all(len(each) <= LEADERS_MAX for own in groups for each in own)
    assert max(map(len, groups)) <= 3


def open_fake(seat: Seat, num_local_ranks: int, generation: int = 0) -> World:
    """Open a world whose default group sends nothing."""
    world = seat.open(World(device_type="fake"), generation, num_local_ranks=num_local_ranks)
    seat.meet(f"opened {generation}")
    return world


def enter(seat: Seat, world: World, step: int) -> str:
    gate = Gate(GroupChannel(seat.group), world_size=seat.world_size)
    try:
        gate.enter(step, lock=world.lock, is_current=lambda: not world.is_broken)
    except BrokenError:
        return "broken"
    return "passed"


def pass_often(seat: Seat, num_local_ranks: int) -> list[int]:
    before = open_sockets()
    world = open_fake(seat, num_local_ranks)
    assert [enter(seat, world, step) for step in range(20)] == ["passed"] * 20
    # One leads to the generation's store.
    num_sockets = len(sockets_since(before)) - 1
    seat.meet("counted")
    return [num_sockets]


@pytest.mark.parametrize(
    ("num_local_ranks", "num_sockets"),
    [(1, [4, 4, 4, 4, 4]), (2, [3, 1, 3, 1, 2]), (3, [3, 2, 2, 2, 1]), (8, [4, 4, 4, 4, 4])],
)
def test_gate_takes_a_socket_for_each_rank_of_the_node_and_for_each_leader(
    num_local_ranks: int, num_sockets: list[int]
) -> None:
    found = run(pass_often, 5, num_local_ranks)

    assert [each for [each] in found] == num_sockets


def stay_away(seat: Seat, absent: int) -> list[str]:
    """The others are in the gate, or in the opening of a pair, when the generation is broken."""
    outcomes = []
    for generation, wait in enumerate(("gate", "pair")):
        world = open_fake(seat, 2, generation)
        if seat.rank == absent:
            world.break_now()
            seat.tell(f"broken {generation}")
            outcomes.append("away")
        else:
            watcher = seat.break_when(f"broken {generation}", world)
            if wait == "gate":
                outcomes.append(enter(seat, world, 3))
            else:
                with pytest.raises((BrokenError, RuntimeError)):
                    seat.group.recv([torch.zeros(1)], absent, 7).wait()
                outcomes.append("broken")
            watcher.join()
        seat.meet(f"ended {generation}")
    return [*outcomes, enter(seat, open_fake(seat, 2, 2), 3)]


@pytest.mark.parametrize("absent", [0, 2, 3])
def test_break_ends_waits_for_a_leader_and_for_a_rank(absent: int) -> None:
    outcomes = run(stay_away, 4, absent)

    ended = [["broken", "broken", "passed"]] * 4
    ended[absent] = ["away", "away", "passed"]
    assert outcomes == ended


def send_around(seat: Seat) -> list[float]:
    """Send to the next rank, and receive from the one before, on one node and between two."""
    world, told = open_fake(seat, 2), torch.zeros(1)
    after, before = (seat.rank + 1) % 4, (seat.rank - 1) % 4
    for source in range(4):
        if seat.rank == source:
            seat.group.send([torch.tensor([float(source)])], after, 7).wait()
        elif before == source:
            seat.group.recv([told], before, 7).wait()
    seat.meet("sent")
    seat.break_when("over", world)
    seat.tell("over")
    with pytest.raises(RuntimeError) as raised:
        seat.group.recv([torch.zeros(1)], before, 7).wait()
    assert "timed out" not in str(raised.value).lower()
    return told.tolist()


def test_ranks_send_to_each_other_until_the_generation_is_broken() -> None:
    assert run(send_around, 4) == [[3.0], [0.0], [1.0], [2.0]]
