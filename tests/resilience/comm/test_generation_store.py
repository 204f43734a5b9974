"""The store of a generation: calls in, replies out; torch's own store says what they bring."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from resilience.comm import generation_store as store_module
from resilience.comm.generation_store import GenerationStore
from resilience.comm.messages import StoreCall, StoreReply, StoreRequest

GENERATION = 4
ONE, OTHER = (1, 7), (2, 7)


def encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


class Caller:
    """A worker that calls a store."""

    def __init__(self, store: GenerationStore, client: tuple[int, int] = ONE) -> None:
        self.store, self.client, self.number = store, client, 0

    def call(
        self, call: StoreCall, *keys: str, values: tuple[bytes, ...] = (), **more: Any
    ) -> list[tuple[tuple[int, int], StoreReply]]:
        self.number += 1
        request = StoreRequest(
            generation=GENERATION,
            number=self.number,
            call=call,
            keys=keys,
            values=tuple(map(encode, values)),
            worker=self.client[1],
        )
        return self.store.serve(self.client, replace(request, **more))

    def ask(self, call: StoreCall, *keys: str, values: tuple[bytes, ...] = ()) -> tuple[str, ...]:
        """Return what a call is answered at once."""
        ((client, reply),) = self.call(call, *keys, values=values)
        assert (client, reply.number, reply.problem) == (self.client, self.number, "")
        return reply.values


KEYS = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(-3, 3)
VALUES = st.sampled_from([b"", b"1", b"2", b"two"])
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("add"), st.just("n"), NUMBERS),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("check"), KEYS),
    st.tuples(st.just("count")),
)


@given(st.lists(CALLS, max_size=12))
def test_calls_bring_what_torchs_own_store_brings(calls: list[tuple[Any, ...]]) -> None:
    theirs, ours = HashStore(), Caller(GenerationStore(GENERATION))
    for call, *rest in calls:
        if call == "set":
            theirs.set(rest[0], rest[1])
            assert ours.call("set", rest[0], values=(rest[1],)) == []
        elif call == "append":
            theirs.append(rest[0], rest[1])
            assert ours.call("append", rest[0], values=(rest[1],)) == []
        elif call == "add":
            found = ours.ask("add", rest[0], values=(b"%d" % rest[1],))
            assert found == (encode(b"%d" % theirs.add(rest[0], rest[1])),)
        elif call == "compare_set":
            key, expected, wanted = rest
            if theirs.check([key]) or expected:
                told = theirs.compare_set(key, expected.decode(), wanted.decode())
                assert ours.ask(call, key, values=(expected, wanted)) == (encode(told),)
            else:
                # HashStore has no word for a key that is missing; TCPStore sets it.
                assert ours.ask(call, key, values=(b"", wanted)) == (encode(wanted),)
                theirs.set(key, wanted)
        elif call == "delete":
            assert bool(ours.ask("delete", rest[0])) == theirs.delete_key(rest[0])
        elif call == "check":
            assert bool(ours.ask("check", rest[0])) == theirs.check([rest[0]])
        elif call == "count":
            assert ours.ask("count") == (encode(b"%d" % theirs.num_keys()),)
        elif theirs.check([rest[0]]):
            assert ours.ask("get", rest[0]) == (encode(theirs.get(rest[0])),)
        else:
            assert ours.call("get", rest[0]) == []
            ours.call("cancel", number=ours.number)


def test_a_call_waits_for_all_its_keys_and_is_answered_once() -> None:
    store = GenerationStore(GENERATION)
    waiting, setting = Caller(store, OTHER), Caller(store)

    assert waiting.call("get", "a", "b", "a") == []
    assert setting.call("set", "a", values=(b"1",)) == []
    ((client, reply),) = setting.call("set", "b", values=(b"2",))

    assert client == OTHER
    assert (reply.number, reply.worker) == (1, OTHER[1])
    assert reply.values == (encode(b"1"), encode(b"2"), encode(b"1"))
    assert setting.call("set", "a", values=(b"3",)) == []


def test_a_key_that_is_deleted_while_others_are_missing_is_waited_for_again() -> None:
    store = GenerationStore(GENERATION)
    waiting, setting = Caller(store, OTHER), Caller(store)
    setting.call("set", "a", values=(b"1",))

    assert waiting.call("wait", "a", "b") == []
    setting.ask("delete", "a")
    assert setting.call("set", "b", values=(b"2",)) == []
    ((_, reply),) = setting.call("set", "a", values=(b"3",))

    assert (reply.number, reply.values) == (1, ())


def test_a_call_that_was_given_up_is_not_answered() -> None:
    store = GenerationStore(GENERATION)
    waiting, setting = Caller(store, OTHER), Caller(store)

    waiting.call("wait", "a")
    waiting.call("cancel", number=1)

    assert setting.call("set", "a", values=(b"1",)) == []


def test_calls_that_were_given_up_leave_nothing() -> None:
    """A program may look for a key by a short wait, again and again."""
    store = GenerationStore(GENERATION)
    polling, waiting = Caller(store), Caller(store, OTHER)
    waiting.call("wait", "b")
    for _ in range(3):
        polling.call("wait", "a", "b")
        polling.call("cancel", number=polling.number)

    assert (len(store._waits), store._waiting.keys()) == (1, {"b"})
    assert len(polling.call("set", "b", values=(b"1",))) == 1


@pytest.mark.parametrize("values", [(b"1",), (b"1", b"x" * 40)])
def test_a_set_that_fails_sets_none_of_its_keys(
    values: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for one of them would be forgotten."""
    monkeypatch.setattr(store_module, "STORE_BYTES_MAX", 40)
    store = GenerationStore(GENERATION)
    waiting, setting = Caller(store, OTHER), Caller(store)
    waiting.call("wait", "a")

    ((client, reply),) = setting.call("set", "a", "b", values=values)

    assert (client, bool(reply.problem), setting.ask("count")) == (ONE, True, (encode(b"0"),))
    assert len(setting.call("set", "a", values=(b"1",))) == 1


def test_what_no_reply_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "REPLY_BYTES_MAX", 12)
    caller = Caller(GenerationStore(GENERATION))
    caller.call("set", "a", "b", values=(b"x" * 6, b"x" * 6))

    ((_, get),) = caller.call("get", "a", "b", "a", "b")
    ((_, append),) = caller.call("append", "a", values=(b"x" * 6,))

    assert get.problem == ("get of a, b, a, ...: the values take 32 bytes; allowed in one call: 12")
    assert append.problem == "append of a: the value of 'a' would take 16 bytes; allowed: 12"
    assert caller.ask("get", "a") == (encode(b"x" * 6),)


def test_calls_of_another_generation_are_dropped() -> None:
    store = GenerationStore(GENERATION)

    assert Caller(store).call("set", "a", values=(b"1",), generation=GENERATION - 1) == []
    assert Caller(store).call("add", "n", values=(b"1",), generation=GENERATION + 1) == []
    assert not Caller(store).ask("check", "a")


def test_a_full_store_takes_no_more_until_something_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "STORE_BYTES_MAX", 40)
    caller = Caller(GenerationStore(GENERATION))
    caller.call("set", "a", values=(b"x" * 24,))

    ((_, reply),) = caller.call("set", "b", values=(b"x" * 24,))
    caller.call("set", "a", values=(b"y" * 24,))

    assert reply.problem == (
        "set of b: no room for 32 bytes of 'b': the generation's keys and values would take 66 "
        "bytes; allowed: 40"
    )
    assert caller.ask("get", "a") == (encode(b"y" * 24),)
    caller.ask("delete", "a")
    assert caller.call("set", "b", values=(b"x" * 24,)) == []


@pytest.mark.parametrize(
    ("call", "keys", "values"),
    [
        ("set", ("a", "b"), (b"1",)),
        ("add", ("a",), (b"one",)),
        ("add", ("a",), ()),
        ("add", (), (b"1",)),
        ("compare_set", ("a",), (b"1",)),
    ],
)
def test_a_call_that_makes_no_sense_is_answered_with_its_problem(
    call: StoreCall, keys: tuple[str, ...], values: tuple[bytes, ...]
) -> None:
    ((_, reply),) = Caller(GenerationStore(GENERATION)).call(call, *keys, values=values)

    assert reply.problem.startswith(f"{call} of {', '.join(keys)}: ")
