"""Tensors into the bytes of a shard and back, hashed in the pass that copies them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resilience.state.stream import Stream
from resilience.state.view import NamedTensor
from resilience.tiered.resharding import Part
from resilience.tiered.shard import (
    ALIGNMENT_BYTES,
    PIECE_BYTES,
    ShardId,
    ShardMeta,
    TensorPlace,
    is_intact,
    piece_bounds,
    pieces_of,
)

Bytes = NDArray[np.uint8]


def place_tensors(tensors: Sequence[NamedTensor]) -> tuple[tuple[TensorPlace, ...], int]:
    """Return where each tensor lies in its shard, and how many bytes the shard has.

    Raises ValueError for two tensors of one name: one of them would be dropped.
    """
    names = [each.name for each in tensors]
    if len({*names}) < len(names):
        raise ValueError(f"the state lists {max(names, key=names.count)} more than once")
    places, end = [], 0
    for each in tensors:
        begin = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        shape = tuple(each.tensor.shape)
        places.append(
            TensorPlace(
                name=each.name,
                dtype=str(each.tensor.dtype).removeprefix("torch."),
                shape=shape,
                offset=begin,
                num_bytes=each.tensor.nbytes,
                full_shape=shape if each.full_shape is None else each.full_shape,
                begin=(0,) * len(shape) if each.begin is None else each.begin,
            )
        )
        end = begin + each.tensor.nbytes
    return tuple(places), end


def describe_shard(
    shard_id: ShardId, tensors: Sequence[NamedTensor], *, num_shards: int, rest: Mapping[str, Any]
) -> ShardMeta:
    """Return what a shard of these tensors will be, without its checksums."""
    places, num_bytes = place_tensors(tensors)
    return ShardMeta(
        id=shard_id,
        num_shards=num_shards,
        num_bytes=num_bytes,
        tensors=places,
        checksums=(),
        rest=rest,
    )


def pack(
    tensors: Sequence[NamedTensor], memory: Bytes, *, on_piece: Callable[[int], None]
) -> tuple[int, ...]:
    """Copy tensors into a shard's memory; returns the xxh3_64 of each piece.

    `on_piece` is called with the bytes that are there, after each piece.
    """
    stream = Stream(list(_with_gaps(tensors)), is_read=True)
    checksums = []
    for begin, end in piece_bounds(len(memory)):
        checksums.append(stream.pass_chunk(memory[begin:end]))
        on_piece(end)
    return tuple(checksums)


def hash_tensors(
    tensors: Sequence[NamedTensor], num_bytes: int, *, on_piece: Callable[[int], None]
) -> tuple[int, ...]:
    """Return what `pack` would, without keeping the bytes."""
    stream = Stream(list(_with_gaps(tensors)), is_read=True)
    piece = np.empty(min(num_bytes, PIECE_BYTES), dtype=np.uint8)
    checksums = []
    for begin, end in piece_bounds(num_bytes):
        checksums.append(stream.pass_chunk(piece[: end - begin]))
        on_piece(end)
    return tuple(checksums)


def unpack(
    memory: Bytes, meta: ShardMeta, tensors: Sequence[NamedTensor], *, on_piece: Callable[[], None]
) -> int | None:
    """Copy a shard into tensors of its layout; returns the first piece that is not what it was.

    The tensors hold parts of two states where that is not None. `on_piece` may raise to end it.
    """
    stream = Stream(list(_with_gaps(tensors)), is_read=False)
    for number, (begin, end) in enumerate(piece_bounds(meta.num_bytes)):
        on_piece()
        if stream.pass_chunk(memory[begin:end]) != meta.checksums[number]:
            return number
    return None


def unpack_parts(
    memory: Bytes,
    meta: ShardMeta,
    parts: Sequence[Part],
    tensors: Sequence[NamedTensor],
    *,
    on_piece: Callable[[], None],
) -> int | None:
    """Copy parts of a shard into parts of tensors, found by name; returns how many bytes.

    None where a piece that holds one of them is not what it was: hashed after the copy,
    so that memory which was used again meanwhile is seen. `on_piece` may raise to end it.
    """
    by_name = {each.name: each.tensor for each in tensors}
    num_bytes = 0
    pieces: set[int] = set()
    for part in parts:
        on_piece()
        tensor = by_name[part.target.name]
        num_bytes += _copy_part(memory, part, tensor)
        pieces.update(pieces_of(*part.bounds(tensor.element_size())))
    for piece in sorted(pieces):
        on_piece()
        if not is_intact(memory.data, meta, piece):
            return None
    return num_bytes


def _copy_part(memory: Bytes, part: Part, tensor: Tensor) -> int:
    """Copy the values of one box; returns their bytes."""
    source = part.source
    value_bytes = tensor.element_size()
    values = memory[source.offset : source.offset + source.num_bytes].view(f"V{value_bytes}")
    box = values.reshape(source.shape)[part.box.within(source.begin)]
    flat = np.frombuffer(bytearray(box.tobytes()), dtype=np.uint8)
    copied = torch.from_numpy(flat).view(tensor.dtype).view(box.shape)
    tensor[part.box.within(part.target.begin)].copy_(copied)
    return len(flat)


def _with_gaps(tensors: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield the tensors, and bytes of their own where one does not begin at another's end."""
    end = 0
    for each in tensors:
        gap = math.ceil(end / ALIGNMENT_BYTES) * ALIGNMENT_BYTES - end
        if gap:
            yield NamedTensor(name="", tensor=torch.zeros(gap, dtype=torch.uint8))
        yield each
        end += gap + each.tensor.nbytes
