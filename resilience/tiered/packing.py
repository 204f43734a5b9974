"""Tensors into the bytes of a shard and back, hashed in the pass that copies them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from resilience.state.stream import Stream
from resilience.state.view import NamedTensor
from resilience.tiered.resharding import Part
from resilience.tiered.shard import (
    ALIGNMENT_BYTES,
    PIECE_BYTES,
    ShardMeta,
    TensorPlace,
    num_pieces,
    piece_bounds,
)

Bytes = NDArray[np.uint8]


def place_tensors(tensors: Sequence[NamedTensor]) -> tuple[tuple[TensorPlace, ...], int]:
    """Return where each tensor lies in its shard, and how many bytes the shard has."""
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


def pack(
    tensors: Sequence[NamedTensor],
    memory: Bytes,
    *,
    on_piece: Callable[[int], None] | None = None,
) -> tuple[int, ...]:
    """Copy tensors into a shard's memory; returns the xxh3_64 of each piece.

    `on_piece` is called with the bytes that are there, after each piece.
    """
    stream = Stream(_fill_gaps(tensors), is_read=True)
    checksums = []
    for begin, end in piece_bounds(len(memory)):
        checksums.append(stream.pass_chunk(memory[begin:end]))
        if on_piece is not None:
            on_piece(end)
    return tuple(checksums)


def unpack(
    memory: Bytes,
    meta: ShardMeta,
    tensors: Sequence[NamedTensor],
    *,
    on_piece: Callable[[], None],
) -> int | None:
    """Copy a shard into tensors of its layout; returns the first piece that is not what it was.

    The tensors hold parts of two states where that is not None. Raises ValueError,
    with the tensors as they were, where the layout is another. `on_piece` may raise to end it.
    """
    check_layout(meta, tensors)
    stream = Stream(_fill_gaps(tensors), is_read=False)
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
        first, last = part.bounds(tensor.element_size())
        pieces.update(range(first // PIECE_BYTES, num_pieces(last)))
    bounds = piece_bounds(meta.num_bytes)
    for number in sorted(pieces):
        on_piece()
        begin, end = bounds[number]
        if xxhash.xxh3_64_intdigest(memory[begin:end].data) != meta.checksums[number]:
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


def check_layout(meta: ShardMeta, tensors: Sequence[NamedTensor]) -> None:
    """Raise ValueError that names the first tensor which is not as the shard has it."""
    places, _ = place_tensors(tensors)
    for here, there in zip(places, meta.tensors, strict=False):
        if (here.name, here.dtype, here.shape) != (there.name, there.dtype, there.shape):
            raise ValueError(
                f"the shard has {there.name} as {there.dtype} {list(there.shape)}, and this rank "
                f"{here.name} as {here.dtype} {list(here.shape)}"
            )
    if len(places) != len(meta.tensors):
        raise ValueError(f"the shard has {len(meta.tensors)} tensors, and this rank {len(places)}")


def _fill_gaps(tensors: Sequence[NamedTensor]) -> list[NamedTensor]:
    """Return the tensors with bytes of their own where one does not begin at another's end."""
    return list(_with_gaps(tensors))


def _with_gaps(tensors: Sequence[NamedTensor]) -> Iterator[NamedTensor]:
    end = 0
    for each in tensors:
        gap = math.ceil(end / ALIGNMENT_BYTES) * ALIGNMENT_BYTES - end
        if gap:
            yield NamedTensor(name="", tensor=torch.zeros(gap, dtype=torch.uint8))
        yield each
        end += gap + each.tensor.nbytes
