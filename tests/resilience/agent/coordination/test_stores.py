"""Stores of generations: one for each where it can be made, and a prefix of its own anyway."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from resilience.agent.coordination import stores as stores_module
from resilience.agent.coordination.stores import GenerationStores
from resilience.inprocess.generation import store_prefix
from tests.resilience.agent.runs import listening

HOST = "127.0.0.1"


def reach(address: str, generation: int) -> PrefixStore:
    """Return the store as a worker of a generation has it."""
    port = int(address.rpartition(":")[2])
    return PrefixStore(store_prefix(generation), TCPStore(HOST, port, is_master=False))


def test_stores_are_those_of_the_two_newest_generations_and_the_next() -> None:
    before = {*listening(os.getpid())}
    stores = GenerationStores(HOST, pytest.fail)
    taken = []
    for generation in range(4):
        taken.append(stores.take(generation))
        stores.prepare()

    left = {*listening(os.getpid())} - before

    assert len(left) == 3
    assert {f"{host}:{port}" for host, port in left} > {*taken[-2:]}
    assert len({*taken}) == 4


def test_last_store_serves_again_where_no_new_one_can_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next generation finds nothing there of the one before; later there is a new one."""
    warnings: list[str] = []
    stores = GenerationStores(HOST, warnings.append)
    first = stores.take(4)
    reach(first, 4).set("met", "yes")

    def refuse(host: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(stores_module, "time", clock)
    with monkeypatch.context() as full:
        full.setattr(stores_module, "listen", refuse)
        stores.prepare()
    stores.prepare()
    again = stores.take(5)

    assert again == first
    assert not reach(again, 5).check(["met"])
    assert reach(again, 4).check(["met"])
    (warning,) = warnings
    assert "Too many open files" in warning
    clock.now_s += 10.0
    stores.prepare()
    assert stores.take(6) != first
