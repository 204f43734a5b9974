"""A wait ends with its generation, also where gloo never hears that the connection is gone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]

from resilience.comm import waits
from resilience.comm.waits import slice_waits, wait_in_slices, wait_in_thread
from resilience.errors import BrokenError
from tests.resilience.rank_processes import run_ranks

LONG = timedelta(seconds=40)
# A connection that its peer closes with bytes unread ends as reset, or as broken while one sends.
LOST_PEER = re.compile("Connection (closed|reset) by peer|Broken pipe")


def run_two(target: Callable[..., Any]) -> list[Any]:
    """Return what the target returns on two ranks, which are told the port of a store."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(target, 2, server.port)


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
    assert run_two(wait_for_an_absent_peer) == [["[2.0, 2.0, 2.0]"]] * 2


def start_all_kinds(rank: int) -> dict[str, Work]:
    """Start a work of each kind that rank 1 takes no part in, each in a group of its own."""
    peer = 1
    one, two = torch.ones(2), torch.ones(4)
    kinds: dict[str, Callable[[dist.ProcessGroup], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(one, group=group, async_op=True),
        "broadcast": lambda group: dist.broadcast(one, peer, group=group, async_op=True),
        "reduce": lambda group: dist.reduce(one, 0, group=group, async_op=True),
        "gather": lambda group: dist.gather(one, [one, one], 0, group=group, async_op=True),
        "scatter": lambda group: dist.scatter(one, None, peer, group=group, async_op=True),
        "all_gather": lambda group: dist.all_gather([one, one], one, group=group, async_op=True),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(
            two, one, group=group, async_op=True
        ),
        "reduce_scatter": lambda group: dist.reduce_scatter(
            one, [one, one], group=group, async_op=True
        ),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
            one, two, group=group, async_op=True
        ),
        "all_to_all": lambda group: dist.all_to_all(
            [one, one], [one, one], group=group, async_op=True
        ),
        "all_to_all_single": lambda group: dist.all_to_all_single(
            two, two.clone(), group=group, async_op=True
        ),
        "barrier": lambda group: dist.barrier(group=group, async_op=True),
        "send": lambda group: dist.isend(torch.ones(1 << 22), peer, group=group),
        "receive": lambda group: dist.irecv(one, peer, group=group),
    }
    groups = {name: dist.new_group() for name in kinds}
    if rank == peer:
        return {}
    return {name: start(groups[name]) for name, start in kinds.items()}


def fail_in_all_kinds(rank: int, world_size: int, port: int) -> dict[str, str]:
    store = open_group(rank, world_size, port)
    works = start_all_kinds(rank)
    if rank == 1:
        store.wait(["started"])
        return {}
    store.set("started", "")
    slice_waits(lambda: False)
    found = {}
    for name, work in works.items():
        try:
            found[name] = f"returned {work.wait()}"
        except RuntimeError as error:
            found[name] = "its error" if LOST_PEER.search(str(error)) else str(error)
    slice_waits(None)
    return found


def test_no_kind_of_work_loses_its_error() -> None:
    """Each that a peer leaves ends with torch's own error, though the generation goes on."""
    found, _ = run_two(fail_in_all_kinds)

    assert len(found) == 14
    assert found == dict.fromkeys(found, "its error")


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
    slice_waits(None)
    store.set("given up", "")
    return said


def test_a_wait_for_a_peer_is_given_up() -> None:
    assert run_two(exchange) == [["[1.0, 1.0, 1.0]"], ["[0.0, 0.0, 0.0]"]]


class Sent:
    """A work that is done, or fails, when it is told to."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self._problem = problem

    def wait(self) -> bool:
        assert self.may_end.wait(LONG.total_seconds())
        if self._problem is not None:
            raise self._problem
        return True


def interrupt() -> bool:
    raise KeyboardInterrupt


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_torch_wait", lambda work: work.wait())
    monkeypatch.setattr(waits, "_waiter", None)


@pytest.mark.usefixtures("works")
def test_a_wait_that_was_left_answers_no_later_one() -> None:
    """Whatever ended it: else a later receive would be taken for done, and its bits for right."""
    left, later = Sent(RuntimeError("of the one that was left")), Sent()
    with pytest.raises(KeyboardInterrupt):
        wait_in_thread(left, interrupt)  # type: ignore[arg-type]
    left.may_end.set()
    later.may_end.set()

    assert wait_in_thread(later, lambda: False)  # type: ignore[arg-type]


@pytest.mark.usefixtures("works")
def test_a_thread_that_was_left_ends_with_its_work() -> None:
    before = set(threading.enumerate())
    left = Sent()
    with pytest.raises(BrokenError):
        wait_in_thread(left, lambda: True)  # type: ignore[arg-type]
    (thread,) = set(threading.enumerate()) - before

    left.may_end.set()
    thread.join(LONG.total_seconds())

    assert not thread.is_alive()


@pytest.mark.usefixtures("works")
def test_an_error_of_a_send_itself_passes_and_the_next_is_waited_for() -> None:
    failed, later = Sent(RuntimeError("connection closed by peer")), Sent()
    failed.may_end.set()
    later.may_end.set()

    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_in_thread(failed, lambda: False)  # type: ignore[arg-type]
    assert wait_in_thread(later, lambda: False)  # type: ignore[arg-type]
