"""The store as torch uses it, over a connection to what an agent serves."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from resilience.comm import agent_store as module
from resilience.comm.agent_store import AgentStore
from resilience.comm.messages import Message, StoreReply, StoreRequest
from resilience.comm.world import forget_world
from resilience.errors import BrokenError
from tests.resilience.stores import Server, connect_store

SHORT = timedelta(milliseconds=50)


@pytest.fixture(scope="module")
def port() -> int:
    return Server().port


@pytest.fixture
def generation(request: pytest.FixtureRequest) -> int:
    return abs(hash(request.node.nodeid)) % (1 << 40)


@pytest.fixture
def store(port: int, generation: int) -> AgentStore:
    return connect_store(port, generation)


@pytest.fixture
def no_groups() -> Iterator[None]:
    yield
    forget_world()


def test_every_call_reaches_the_store_through_torchs_own_prefix(store: AgentStore) -> None:
    named = PrefixStore("group", store)
    named.set("a", "1")
    named.multi_set(["b", "c"], [b"\x00\xff", b""])
    named.append("a", "2")

    assert (named.get("a"), named.multi_get(["b", "c"])) == (b"12", [b"\x00\xff", b""])
    assert (named.add("n", 5), named.add("n", -7)) == (5, -2)
    assert named.compare_set("a", "12", "3") == b"3"
    assert (named.check(["a", "n"]), named.check(["a", "none"])) == (True, False)
    assert (named.delete_key("a"), named.delete_key("a")) == (True, False)
    assert named.num_keys() == 3
    assert named.has_extended_api()
    assert store.get("group/n") == b"-2"


@pytest.mark.parametrize("wraps", [False, True])
def test_a_wait_ends_with_the_stores_time_out_or_its_own(store: AgentStore, wraps: bool) -> None:
    asked = PrefixStore("group", store) if wraps else store
    asked.set_timeout(SHORT)
    key = "group/none" if wraps else "none"

    with pytest.raises(dist.DistStoreError, match=rf"wait timeout after 0\.05 s, keys: {key}"):
        asked.get("none")
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.02 s, keys: .*, \.\.\."):
        asked.wait(["none", "a", "b", "c"], timedelta(milliseconds=20))


def test_what_was_given_up_is_not_taken_for_the_next_calls_answer(store: AgentStore) -> None:
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        store.wait(["late"], SHORT)

    store.set("late", "1")

    assert store.add("n", 1) == 1
    assert store.get("late") == b"1"


@pytest.mark.parametrize("ends_by", [KeyboardInterrupt, dist.DistStoreError])
def test_a_call_that_was_given_up_is_cancelled_and_harms_no_later_one(
    ends_by: type[BaseException],
) -> None:
    sent: list[Any] = []

    def send(message: Message) -> None:
        sent.append(message)
        if ends_by is KeyboardInterrupt and len(sent) == 1:
            raise ends_by  # as a signal's handler does at any place of the call

    store = AgentStore(3, send)
    with pytest.raises(ends_by):
        store.wait(["a", "b"], SHORT)
    get, cancel = sent
    assert (cancel.call, cancel.number) == ("cancel", get.number)
    store.take(StoreReply(generation=3, number=get.number, worker=1, problem="too much at once"))

    store.set("a", "1")


def test_a_wait_ends_after_its_time_out_also_where_a_signals_handler_took_longer(
    store: AgentStore,
) -> None:
    has_run = threading.Event()

    def outlast(number: int, frame: object) -> None:
        with pytest.raises(dist.DistStoreError):
            store.wait(["none"], 4 * SHORT)
        has_run.set()

    before = signal.signal(signal.SIGALRM, outlast)
    signal.setitimer(signal.ITIMER_REAL, SHORT.total_seconds() / 5)
    try:
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            store.wait(["none"], SHORT)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert has_run.is_set()


@pytest.mark.parametrize("call", ["get", "wait", "add", "set"])
def test_a_break_ends_calls_that_wait_and_those_that_come(store: AgentStore, call: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("none"),
        "wait": lambda: store.wait(["none"]),
        "add": lambda: store.add("n", 1),
        "set": lambda: store.set("a", "1"),
    }
    if call in ("get", "wait"):
        threading.Timer(0.1, store.break_now).start()
        with pytest.raises(BrokenError, match="ended during a call"):
            calls[call]()
    store.break_now()

    with pytest.raises(BrokenError, match="has ended"):
        calls[call]()


def test_a_value_above_the_limit_is_refused_where_it_is_set(
    store: AgentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VALUE_BYTES_MAX", 3)

    with pytest.raises(dist.DistStoreError, match="value of 'a' has 4 bytes; allowed: 3"):
        store.set("a", b"1234")
    store.set("a", b"123")
    assert store.get("a") == b"123"


def test_a_set_of_many_that_cannot_be_is_refused_at_once(
    store: AgentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CALL_BYTES_MAX", 1000)
    store.multi_set([], [])

    with pytest.raises(ValueError, match="2 keys have 1 values; allowed: as many"):
        store.multi_set(["a", "b"], ["1"])
    with pytest.raises(dist.DistStoreError, match=r"set of 2 keys takes \d+ bytes; allowed: 1000"):
        store.multi_set(["a", "b"], ["1" * 400] * 2)
    assert not store.check(["a"])


def test_a_set_that_found_no_room_fails_the_next_call_and_no_later_one() -> None:
    sent: list[Any] = []
    store = AgentStore(3, sent.append)
    store.set("a", "1")
    (request,) = sent
    assert isinstance(request, StoreRequest)

    store.take(StoreReply(generation=2, number=request.number, worker=1, problem="another's"))
    store.set("a", "2")
    store.take(StoreReply(generation=3, number=request.number, worker=1, problem="no room"))

    with pytest.raises(dist.DistStoreError, match="no room"):
        store.get("a")
    store.set("a", "3")
    assert len(sent) == 3


def test_a_forked_process_does_not_touch_the_link(store: AgentStore) -> None:
    child = os.fork()
    if child == 0:
        try:
            store.set("a", "child")
        except dist.DistStoreError as error:
            os._exit(7 if "not to its children" in str(error) else 8)
        os._exit(9)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not store.check(["a"])


def test_a_store_outlives_every_reference_of_python() -> None:
    """torch ends the process where C++ calls a store whose Python part is gone."""
    sent: list[Message] = []
    named = PrefixStore("group", AgentStore(3, sent.append))
    gc.collect()

    named.set("a", "1")

    (request,) = sent
    assert isinstance(request, StoreRequest)
    assert request.keys == ("group/a",)


@pytest.mark.usefixtures("no_groups")
def test_groups_and_their_parts_meet_in_it(store: AgentStore) -> None:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=SHORT * 100)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group([0]))

    assert tensor.item() == 1.0
    assert store.num_keys() >= 2


def test_calls_are_answered_while_another_thread_never_rests(store: AgentStore) -> None:
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        assert [store.add("n", 1) for _ in range(20)] == [*range(1, 21)]
    finally:
        is_over.set()
        spinning.join()


def test_many_threads_get_their_own_answers(store: AgentStore) -> None:
    found: dict[int, bytes] = {}

    def ask(number: int) -> None:
        found[number] = store.get(f"key/{number}")

    threads = [threading.Thread(target=ask, args=[number]) for number in range(16)]
    for thread in threads:
        thread.start()
    for number in reversed(range(16)):
        store.set(f"key/{number}", str(number))
    for thread in threads:
        thread.join()

    assert found == {number: str(number).encode() for number in range(16)}
