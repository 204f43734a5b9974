"""Reads tensors as bytes, and makes one short word of a whole state.

Bytes come in the order of the values, whatever a tensor's strides are: equal
values give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from resilience.state.view import NamedTensor, StateView

PIECE_BYTES = 4 << 20
"""How much is copied at once of what cannot be read where it is."""


def digest_state(view: StateView) -> str:
    """Return the xxh3_128 of all tensors' names, shapes, types and bytes, in 32 hex digits.

    Copies nothing but 4 MiB at a time of tensors that are on a device or not contiguous. The
    state's rest is not part of the digest.
    """
    tensors = view.tensors()
    digest = xxhash.xxh3_128(describe_layout(tensors))
    for each in tensors:
        for piece in _host_pieces(each.tensor.detach()):
            digest.update(piece.data)
    return digest.hexdigest()


def describe_layout(tensors: Sequence[NamedTensor]) -> bytes:
    """Return names, types and shapes as JSON; equal for ranks that own the same shard."""
    rows = [[each.name, str(each.tensor.dtype), list(each.tensor.shape)] for each in tensors]
    return json.dumps(rows, separators=(",", ":")).encode()


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as uint8 of one dim, sharing it; any device."""
    return tensor.detach().view(-1).view(torch.uint8)


def _host_pieces(tensor: Tensor) -> Iterator[NDArray[np.uint8]]:
    """Yield all bytes of a tensor, in place where the host can read them there."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = flat_bytes(tensor)
        if flat.device.type == "cpu":
            yield flat.numpy()
            return
        for piece in torch.split(flat, PIECE_BYTES):
            yield piece.cpu().numpy()
        return
    if tensor.nbytes <= PIECE_BYTES:
        yield flat_bytes(tensor.contiguous().cpu()).numpy()
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > PIECE_BYTES:
        for row in tensor:
            yield from _host_pieces(row)
        return
    for rows in torch.split(tensor, PIECE_BYTES // row_bytes):
        yield from _host_pieces(rows)
