from __future__ import annotations

import threading

import pytest
import torch

from resilience.testing.async_group import AsyncWorld

TIMEOUT_S = 60.0
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def _finish(world):
    for group in world.groups:
        group.synchronize(TIMEOUT_S)


def test_all_reduce_sums_in_the_order_of_ranks():
    """1e8 + 1 - 1e8 is 0 in float32, in this order and no other."""
    values = [torch.tensor([each]) for each in (1e8, 1.0, -1e8)]

    with AsyncWorld(3) as world:
        for group, value in reversed(list(zip(world.groups, values, strict=True))):
            group.all_reduce(value).wait()
        _finish(world)

    assert [value.item() for value in values] == [0.0] * 3


def test_broadcast_and_all_gather():
    with AsyncWorld(2) as world:
        values = [torch.tensor([rank]) for rank in range(2)]
        gathered = [[torch.zeros(1, dtype=torch.int64) for _ in range(2)] for _ in range(2)]
        for group, value, outputs in zip(world.groups, values, gathered, strict=True):
            group.all_gather(outputs, value)
            group.broadcast(value, src=1)
        _finish(world)

    assert gathered == [[0, 1], [0, 1]]
    assert values == [1, 1]


def test_messages_between_two_keep_their_order():
    with AsyncWorld(3) as world:
        received = [torch.zeros(1) for _ in range(2)]
        for value in (1.0, 2.0):
            world.groups[0].send(torch.tensor([value]), dst=2)
        for each in received:
            world.groups[2].recv(each, src=0)
        _finish(world)

    assert received == [1.0, 2.0]


def test_wait_returns_before_the_sum_is_there():
    with AsyncWorld(2) as world:
        value = torch.ones(1)
        world.groups[0].all_reduce(value).wait()
        assert world.groups[0].settle(TIMEOUT_S)

        assert value.item() == 1
        world.groups[1].all_reduce(torch.ones(1))
        _finish(world)
        assert value.item() == 2


def test_buffer_is_read_when_its_turn_comes():
    """What the host writes without synchronising is what is sent."""
    go = threading.Event()
    with AsyncWorld(2) as world:
        value = torch.ones(1)
        world.groups[0].enqueue(lambda: go.wait(TIMEOUT_S))
        world.groups[0].all_reduce(value)
        value.fill_(5)
        go.set()
        world.groups[1].all_reduce(torch.ones(1))
        _finish(world)

    assert value.item() == 6


def test_barrier_holds_the_queue_and_not_the_host():
    done = []
    with AsyncWorld(2) as world:
        world.groups[0].barrier().wait()
        world.groups[0].enqueue(lambda: done.append("after"))
        assert world.groups[0].settle(TIMEOUT_S)
        assert done == []

        world.groups[1].barrier()
        _finish(world)

    assert done == ["after"]


@pytest.mark.parametrize("garbage", ["random", "stale", "untouched"])
def test_queue_runs_on_over_garbage_after_abort(garbage):
    """The kernels behind an aborted reduction write what they make of it."""
    gradient, parameter = torch.zeros(4), torch.zeros(4)
    expected = {"stale": [2.0] * 4, "untouched": [7.0] * 4}
    with AsyncWorld(2, garbage=garbage) as world:
        first = torch.ones(4)
        for group in world.groups:
            group.all_reduce(first if group.rank == 0 else torch.ones(4))
        _finish(world)
        gradient.fill_(7.0)
        world.groups[0].all_reduce(gradient)
        world.groups[0].enqueue(lambda: parameter.copy_(gradient))
        world.groups[0].wait_until_waiting(TIMEOUT_S)

        world.groups[0].abort()
        world.groups[0].synchronize(TIMEOUT_S)

    assert parameter.numpy().tobytes() == gradient.numpy().tobytes()
    assert parameter.tolist() == expected.get(garbage, parameter.tolist())
    assert parameter.tolist() != [8.0] * 4


def test_garbage_is_that_of_the_seed():
    def abort_one(seed):
        output = torch.zeros(4, dtype=torch.int64)
        with AsyncWorld(2, seed=seed) as world:
            world.groups[0].abort()
            world.groups[0].all_reduce(output)
            world.groups[0].synchronize(TIMEOUT_S)
        return output.tolist()

    assert abort_one(1) == abort_one(1)
    assert abort_one(1) != abort_one(2)


def test_aborted_rank_leaves_its_part_or_takes_it_along_by_the_seed():
    def peer_waits(seed):
        with AsyncWorld(2, seed=seed) as world:
            gone, peer = world.groups
            gone.all_reduce(torch.ones(1))
            gone.wait_until_waiting(TIMEOUT_S)
            gone.abort()
            gone.synchronize(TIMEOUT_S)
            value = torch.ones(1)
            peer.all_reduce(value)
            waits = peer.settle(TIMEOUT_S)
            assert value.item() == (1 if waits else 2)
        return waits

    waits = [peer_waits(seed) for seed in range(8)]

    assert set(waits) == {False, True}
    assert waits == [peer_waits(seed) for seed in range(8)]


def test_abort_of_one_rank_ends_no_wait_of_another():
    with AsyncWorld(2) as world:
        world.groups[1].abort()
        world.groups[0].all_reduce(torch.ones(1))

        assert world.groups[0].settle(TIMEOUT_S)
        with pytest.raises(TimeoutError, match=r"^rank 0's queue is not done after 0\.0 s$"):
            world.groups[0].synchronize(0.0)


def test_collectives_in_another_order_are_told():
    with AsyncWorld(2) as world:
        world.groups[0].barrier()
        world.groups[0].wait_until_waiting(TIMEOUT_S)
        world.groups[1].all_reduce(torch.ones(1))

        with pytest.raises(RuntimeError, match="rank 1's queue: all_reduce meets barrier of"):
            world.groups[1].synchronize(TIMEOUT_S)
        world.groups[1].synchronize(TIMEOUT_S)


def test_error_of_local_work_is_told_and_stops_nothing():
    done = []
    with AsyncWorld(1) as world:
        world.groups[0].enqueue(lambda: 1 // 0)
        world.groups[0].enqueue(lambda: done.append(1))

        with pytest.raises(RuntimeError, match=r"^rank 0's queue: integer division"):
            world.groups[0].synchronize(TIMEOUT_S)

    assert done == [1]


def test_end_of_the_world_ends_all_queues():
    before = threading.active_count()
    with AsyncWorld(2) as world:
        world.groups[0].barrier()

    assert threading.active_count() == before
