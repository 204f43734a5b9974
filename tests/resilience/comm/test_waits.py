"""A wait ends with its generation, also where gloo never hears that the connection is gone."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]

from resilience.comm.waits import slice_waits, wait_in_slices
from resilience.errors import BrokenError
from tests.resilience.rank_processes import run_ranks

LONG = timedelta(seconds=40)


def open_group(rank: int, world_size: int, port: int) -> TCPStore:
    store = TCPStore("127.0.0.1", port, timeout=LONG)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=LONG)
    return store


def wait_for_an_absent_peer(rank: int, world_size: int, port: int) -> list[str]:
    """Rank 1 takes part only after rank 0 has given its wait up twice."""
    store = open_group(rank, world_size, port)
    tensor = torch.ones(3)
    if rank == 1:
        store.wait(["given up"])
        dist.all_reduce(tensor)
        return [str(tensor.tolist())]
    said = []
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(BrokenError, match="ended while this rank waited"):
        wait_in_slices(work, lambda: True)
    slice_waits(lambda: True)
    with pytest.raises(BrokenError):
        work.wait()
    slice_waits(lambda: False)
    store.set("given up", "")
    # A slice that ends harms nothing: the same work then comes to its sum.
    work.wait()
    said.append(str(tensor.tolist()))
    slice_waits(None)
    assert "slice" not in getattr(Work.wait, "__module__", "")
    return said


def test_a_wait_is_given_up_and_taken_up_again() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    assert run_ranks(wait_for_an_absent_peer, 2, server.port) == [["[2.0, 2.0, 2.0]"]] * 2


def fail(rank: int, world_size: int, port: int) -> str:
    """Rank 1 leaves for good; the other hears torch's own error, not one of ours."""
    open_group(rank, world_size, port)
    if rank == 1:
        return "left"
    work = dist.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(RuntimeError) as caught:
        wait_in_slices(work, lambda: False)
    return type(caught.value).__name__


def test_an_error_of_the_work_itself_passes() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    assert run_ranks(fail, 2, server.port) == ["RuntimeError", "left"]


def exchange(rank: int, world_size: int, port: int) -> list[str]:
    """Two ranks send and receive; then one waits for a message that is never sent."""
    store = open_group(rank, world_size, port)
    slice_waits(lambda: False)
    own, theirs = torch.full((3,), float(rank)), torch.zeros(3)
    works = [dist.isend(own, 1 - rank), dist.irecv(theirs, 1 - rank)]
    for work in works:
        assert work is not None
        assert work.wait()
    said = [str(theirs.tolist())]
    if rank == 1:
        store.wait(["given up"])
        return said
    late = dist.irecv(torch.zeros(3), 1)
    assert late is not None
    slice_waits(lambda: True)
    with pytest.raises(BrokenError, match="ended while this rank waited for a peer"):
        late.wait()
    # The thread that waits for it is left behind, and the next wait has another one.
    assert sum(each.name == "wait-for-peer" for each in threading.enumerate()) == 1
    store.set("given up", "")
    slice_waits(None)
    return said


def test_a_wait_for_a_peer_is_given_up() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    assert run_ranks(exchange, 2, server.port) == [["[1.0, 1.0, 1.0]"], ["[0.0, 0.0, 0.0]"]]
