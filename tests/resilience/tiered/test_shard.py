"""Names, descriptions and digests of shards."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.tiered.shard import (
    PIECE_BYTES,
    ShardId,
    ShardMeta,
    TensorPlace,
    check_bounds,
    content_digest,
    decode_meta,
    encode_meta,
    num_pieces,
    piece_bounds,
)

ID = ShardId(namespace="run", step=7, generation=2, shard="0-1")
PLACE = TensorPlace(
    name="layer.weight",
    dtype="bfloat16",
    shape=(2, 3),
    offset=64,
    num_bytes=12,
    full_shape=(4, 3),
    begin=(2, 0),
)
META = ShardMeta(
    id=ID,
    num_shards=4,
    num_bytes=76,
    tensors=(PLACE,),
    checksums=(2**64 - 1,),
    rest={"scheduler": {"last": 0.1}, "names": ["a"]},
)

WHOLE = st.integers(0, 2**62)
SHAPES = st.lists(WHOLE, max_size=3).map(tuple)
METAS = st.builds(
    ShardMeta,
    id=st.builds(
        ShardId, namespace=st.text(), step=WHOLE, generation=st.integers(), shard=st.text()
    ),
    num_shards=st.integers(1, 9),
    num_bytes=st.integers(1, PIECE_BYTES),
    tensors=st.lists(
        st.builds(
            TensorPlace,
            name=st.text(),
            dtype=st.text(),
            shape=SHAPES,
            offset=st.just(0),
            num_bytes=st.sampled_from((0, 1)),
            full_shape=SHAPES,
            begin=SHAPES,
        ),
        max_size=3,
    ).map(tuple),
    checksums=st.tuples(st.integers(0, 2**64 - 1)),
    rest=st.dictionaries(
        st.text(), st.none() | st.integers() | st.text() | st.lists(st.booleans())
    ),
)


@given(METAS)
def test_a_description_can_be_read_back(meta: ShardMeta) -> None:
    text = encode_meta(meta)

    assert decode_meta(text) == meta
    assert b"\n" not in text


def change(*path: str | int, to: Any) -> bytes:
    content = json.loads(encode_meta(META))
    place = content
    for each in path[:-1]:
        place = place[each]
    place[path[-1]] = to
    return json.dumps(content).encode()


def without(name: str) -> bytes:
    content = json.loads(encode_meta(META))
    del content[name]
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"{}", id="empty"),
        pytest.param(b"\xff\xfe", id="no-text"),
        pytest.param(b"\x80\x04K\x01.", id="pickle"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(encode_meta(META)[:-1], id="cut"),
        pytest.param(change("format", to=2), id="format"),
        pytest.param(change("extra", to=1), id="unknown-key"),
        pytest.param(without("rest"), id="missing-key"),
        pytest.param(change("id", "step", to=-1), id="negative-step"),
        pytest.param(change("id", "step", to=1.5), id="broken-step"),
        pytest.param(change("id", "step", to=True), id="boolean"),
        pytest.param(change("id", "namespace", to=None), id="no-namespace"),
        pytest.param(change("id", to="run"), id="id-as-text"),
        pytest.param(change("num_shards", to=0), id="no-shards"),
        pytest.param(change("num_bytes", to=10 * PIECE_BYTES), id="too-few-checksums"),
        pytest.param(change("checksums", to=[1, 2]), id="too-many-checksums"),
        pytest.param(change("checksums", to=["1"]), id="checksum-as-text"),
        pytest.param(change("tensors", to=1), id="no-tensors"),
        pytest.param(change("tensors", 0, "num_bytes", to=13), id="beyond-the-end"),
        pytest.param(change("tensors", 0, "offset", to=-64), id="before-the-begin"),
        pytest.param(change("tensors", 0, "shape", to=[-1]), id="negative-shape"),
        pytest.param(change("tensors", 0, "shape", to=6), id="shape-as-number"),
        pytest.param(change("rest", to=[]), id="rest-as-list"),
    ],
)
def test_what_is_no_description_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"description of a shard|does not lie in"):
        decode_meta(text)


def test_same_bytes_under_the_same_names_have_one_digest() -> None:
    other = replace(META, id=replace(ID, step=8, shard="x"), num_shards=1, rest={})

    assert content_digest(META) == content_digest(other)
    assert len(content_digest(META)) == 32


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(replace(META, checksums=(1,)), id="bytes"),
        pytest.param(replace(META, num_bytes=77), id="size"),
        pytest.param(replace(META, tensors=(replace(PLACE, name="x"),)), id="name"),
        pytest.param(replace(META, tensors=(replace(PLACE, dtype="float16"),)), id="type"),
        pytest.param(replace(META, tensors=(replace(PLACE, shape=(3, 2)),)), id="shape"),
        pytest.param(replace(META, tensors=(replace(PLACE, offset=0),)), id="place"),
    ],
)
def test_other_bytes_or_names_have_another_digest(other: ShardMeta) -> None:
    assert content_digest(META) != content_digest(other)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, []),
        (1, [(0, 1)]),
        (PIECE_BYTES, [(0, PIECE_BYTES)]),
        (PIECE_BYTES + 1, [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES + 1)]),
    ],
)
def test_pieces_cover_a_shard(num_bytes: int, expected: list[tuple[int, int]]) -> None:
    assert piece_bounds(num_bytes) == expected
    assert num_pieces(num_bytes) == len(expected)


def test_a_tensor_has_to_lie_in_its_shard() -> None:
    check_bounds([PLACE], 76)
    with pytest.raises(
        ValueError, match=r"tensor layer.weight does not lie in a shard of 75 bytes"
    ):
        check_bounds([PLACE], 75)
