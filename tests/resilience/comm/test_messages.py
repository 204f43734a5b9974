"""Messages come back as they were sent; whatever else comes is refused with ValueError."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.comm import messages as wire
from resilience.comm.messages import (
    LINE_BYTES_MAX,
    Beat,
    Break,
    Finished,
    Join,
    LineReader,
    Message,
    Ready,
    StoreCall,
    decode,
    encode,
)
from resilience.state.layout import make_layout

KINDS = [getattr(wire, name) for name in wire._KINDS]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(), PLAIN, max_size=3)
LAYOUTS = st.builds(
    lambda nodes, num_shards, num_times, is_sharded: make_layout(
        nodes=nodes,
        num_local_ranks=num_shards * num_times,
        num_shards=num_shards,
        is_sharded=is_sharded,
    ),
    st.lists(st.text(), min_size=1, max_size=4, unique=True),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
)
VALUES = {
    "StrictInt": st.integers(),
    "StrictBool": st.booleans(),
    "StrictFloat": st.floats(allow_nan=False, allow_infinity=False),
    "str": st.text(),
    "float | None": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "Mapping[str, Any]": OBJECTS,
    "tuple[str, ...]": st.lists(st.text()).map(tuple),
    "tuple[Mapping[str, Any], ...]": st.lists(OBJECTS, max_size=4).map(tuple),
    "StoreCall": st.sampled_from(get_args(StoreCall)),
    "Ballot": st.tuples(st.integers(), st.text()),
    "Layout": LAYOUTS,
    "Layout | None": st.none() | LAYOUTS,
    "tuple[tuple[str, str], ...]": st.lists(st.tuples(st.text(), st.text())).map(tuple),
}


def messages() -> st.SearchStrategy[Message]:
    def of(kind: type[Message]) -> st.SearchStrategy[Message]:
        return st.builds(kind, **{each.name: VALUES[str(each.type)] for each in fields(kind)})

    return st.one_of([of(kind) for kind in KINDS])


@given(messages())
def test_message_comes_back_equal(message: Message) -> None:
    line = encode(message)

    assert line.count(b"\n") == 1
    assert decode(line) == message


@given(st.lists(messages(), max_size=4), st.lists(st.integers(1, 50)))
def test_stream_may_be_cut_anywhere(sent: list[Message], cuts: list[int]) -> None:
    stream = b"".join(map(encode, sent))
    reader, received = LineReader(), []
    for size in cuts:
        received += reader.feed(stream[:size])
        stream = stream[size:]
    received += reader.feed(stream)

    assert received == sent


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"GET / HTTP/1.1", id="http"),
        pytest.param(b"\x16\x03\x01\xff\xfe", id="bytes"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"kind":["Join"]}', id="kind-is-a-list"),
        pytest.param(b'{"kind":"Nothing"}', id="unknown"),
        pytest.param(b'{"kind":"Join"}', id="missing"),
        pytest.param(b'{"kind":"Join","node":1,"address":"a"}', id="wrong-type"),
        pytest.param(b'{"kind":"Ready","pid":true}', id="true-is-no-number"),
        pytest.param(b'{"kind":"Beat","nodes":5}', id="number-for-a-list"),
        pytest.param(b'{"kind":"Beat","nodes":[["a"]]}', id="half-a-pair"),
        pytest.param(b'{"kind":"Ready","pid":1,"more":2}', id="too-much"),
    ],
)
def test_whatever_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"no |be read|column|codec|Expecting"):
        LineReader().feed(line + b"\n")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"more": 1}, "the Join cannot be read: layout.more 1"),
        ({"nodes": "ab"}, "the Join cannot be read: layout.nodes 'ab'"),
        ({"nodes": ["a", 1]}, "the Join cannot be read: layout.nodes.1 1"),
        ({"num_local_ranks": "2"}, "the Join cannot be read: layout.num_local_ranks '2'"),
        ({"num_shards": True}, "the Join cannot be read: layout.num_shards True"),
        ({"is_sharded": 1}, "the Join cannot be read: layout.is_sharded 1"),
        ({"num_shards": 3}, "the Join cannot be read: layout .*: Value error, .* does not divide"),
    ],
)
def test_layout_that_is_none_is_refused(values: dict[str, Any], message: str) -> None:
    layout = make_layout(nodes=["a", "b"], num_local_ranks=2, num_shards=2)
    data = json.loads(encode(Join(node="a", address="b", layout=layout)))
    assert decode(json.dumps(data).encode()) == Join(node="a", address="b", layout=layout)
    data["layout"] |= values

    with pytest.raises(ValueError, match=message):
        decode(json.dumps(data).encode())


@given(st.binary(max_size=200))
def test_rubbish_raises_nothing_but_value_error(data: bytes) -> None:
    try:
        LineReader().feed(data + b"\n")
    except ValueError:
        return


def test_line_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than"):
        LineReader().feed(b"x" * (LINE_BYTES_MAX + 1))


def test_older_peer_may_leave_out_what_has_a_default() -> None:
    assert decode(b'{"kind":"Beat"}') == Beat()
    assert decode(b'{"kind":"Join","node":"a","address":"b"}') == Join(node="a", address="b")


def test_every_message_is_known_on_the_wire() -> None:
    classes = {each for each in vars(wire).values() if isinstance(each, type)}

    assert set(KINDS) == {each for each in classes if issubclass(each, Message)} - {Message}


def test_kind_on_the_wire_is_the_name_of_the_class() -> None:
    kinds = [
        json.loads(encode(each))["kind"]
        for each in (
            Ready(pid=1),
            Break(generation=1, reason=""),
            Finished(generation=1, rank=0, status=0),
        )
    ]

    assert kinds == ["Ready", "Break", "Finished"]
