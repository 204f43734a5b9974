"""What a stored shard is: its name, its tensors and its checksums. Pure.

A shard is the bytes of one rank's tensors, side by side in the order of its
`StateView`, with 64 bytes' alignment. It is hashed in pieces, so that it can be
copied, sent and checked piece by piece.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import xxhash
from pydantic import ConfigDict, Field, StrictInt

from resilience.runtime.records import fields_of, from_json, read_record, to_json

ALIGNMENT_BYTES = 64
PIECE_BYTES = 8 << 20
FORMAT = 1
_Whole = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShardId:
    """Which shard of which step of which job."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    namespace: str
    step: _Whole
    """Updates that the state has seen."""
    generation: StrictInt
    """Whose gradients made the last update: two histories of one step never mix."""
    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor lies in its shard."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: str
    dtype: str
    """As torch names it, without `torch.`."""
    shape: tuple[_Whole, ...]
    offset: _Whole
    num_bytes: _Whole
    full_shape: tuple[_Whole, ...]
    """Shape of the whole tensor that this is a part of."""
    begin: tuple[_Whole, ...]
    """Where in the whole tensor this part begins, by dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeta:
    """All that is known of a shard without its bytes."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    id: ShardId
    num_shards: _Whole
    """How many shards make the step whole."""
    num_bytes: _Whole
    tensors: tuple[TensorPlace, ...]
    checksums: tuple[_Whole, ...]
    """xxh3_64 of each piece of PIECE_BYTES, the last may be shorter."""
    rest: Mapping[str, Any]
    """The small rest of the state, as JSON data."""


def num_pieces(num_bytes: int) -> int:
    """Return how many pieces a shard of so many bytes has."""
    return -(-num_bytes // PIECE_BYTES)


def piece_bounds(num_bytes: int) -> list[tuple[int, int]]:
    """Return where each piece begins and ends."""
    starts = range(0, num_bytes, PIECE_BYTES)
    return [(begin, min(begin + PIECE_BYTES, num_bytes)) for begin in starts]


def pieces_of(begin: int, end: int) -> range:
    """Return which pieces hold the bytes of a shard from `begin` up to `end`."""
    return range(begin // PIECE_BYTES, num_pieces(end)) if end > begin else range(0)


def is_intact(memory: memoryview, meta: ShardMeta, piece: int) -> bool:
    """Hash a piece of a shard again, some 0.1 s a GiB; say whether it is what it was."""
    begin = piece * PIECE_BYTES
    end = min(begin + PIECE_BYTES, meta.num_bytes)
    return xxhash.xxh3_64_intdigest(memory[begin:end]) == meta.checksums[piece]


def content_digest(meta: ShardMeta) -> str:
    """Return what is equal for shards of the same bytes under the same names, in 32 hex digits."""
    layout = [[each.name, each.dtype, each.shape, each.offset] for each in meta.tensors]
    content = json.dumps([layout, meta.num_bytes, meta.checksums], separators=(",", ":"))
    return xxhash.xxh3_128(content.encode()).hexdigest()


def encode_meta(meta: ShardMeta) -> bytes:
    """Return the meta as JSON; equal metas give equal bytes."""
    return to_json({"format": FORMAT, **fields_of(meta)}, is_sorted=True)


def decode_meta(text: bytes) -> ShardMeta:
    """Read a meta back; raises ValueError for what is none."""
    content = from_json(text, "description of a shard")
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError("no description of a shard: another format")
    return read_meta(content)


def read_meta(content: object) -> ShardMeta:
    """Return the meta of JSON data; raises ValueError for what is none."""
    meta = read_record(ShardMeta, content, "description of a shard")
    if len(meta.checksums) != num_pieces(meta.num_bytes):
        raise ValueError(
            f"no description of a shard: {len(meta.checksums)} checksums for {meta.num_bytes} bytes"
        )
    if meta.num_shards < 1:
        raise ValueError(f"no description of a shard: {meta.num_shards} shards")
    check_bounds(meta.tensors, meta.num_bytes)
    return meta


def decode_metas(text: bytes, num_bytes_max: int) -> dict[ShardId, ShardMeta]:
    """Return what lines say of shards of one content; one that makes no sense hides no other.

    A line that says otherwise of the content than most lines do is left out too.
    """
    metas: dict[ShardId, ShardMeta] = {}
    for line in text.split(b"\n"):
        with suppress(ValueError):
            meta = decode_meta(line)
            if meta.num_bytes <= num_bytes_max:
                metas[meta.id] = meta
    digests = Counter(map(content_digest, metas.values())).most_common(1)
    return {key: each for key, each in metas.items() if content_digest(each) == digests[0][0]}


def check_bounds(tensors: Sequence[TensorPlace], num_bytes: int) -> None:
    """Raise ValueError for a tensor that does not lie in the shard."""
    for each in tensors:
        if each.offset < 0 or each.num_bytes < 0 or each.offset + each.num_bytes > num_bytes:
            raise ValueError(f"tensor {each.name} does not lie in a shard of {num_bytes} bytes")
