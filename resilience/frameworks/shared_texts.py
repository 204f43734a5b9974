"""A text of each rank, brought to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

_HEAD = 8
"""Bytes of a row that say how long its text is."""
_WIDTH_MIN = 1 << 13


def share_texts(
    own: str, before: Sequence[str], *, rank: int, num_ranks: int, width_min: int = _WIDTH_MIN
) -> list[str]:
    """Return each rank's text; called by all ranks, with those of the time before.

    The room for a text is that of the longest one before, with some more, so that one collective
    is enough for texts that hardly grow.
    """
    packed = own.encode()
    width = max([width_min, *(2 * len(each.encode()) for each in before)])
    while True:
        rows = torch.zeros(num_ranks, _HEAD + width, dtype=torch.uint8)
        row = bytearray(len(packed).to_bytes(_HEAD, "big") + packed[:width])
        rows[rank, : len(row)] = torch.frombuffer(row, dtype=torch.uint8)
        if num_ranks > 1:
            dist.all_reduce(rows)
        found = [bytes(each) for each in rows.numpy()]
        lengths = [int.from_bytes(each[:_HEAD], "big") for each in found]
        if max(lengths) <= width:
            texts = zip(found, lengths, strict=True)
            return [each[_HEAD : _HEAD + length].decode() for each, length in texts]
        width = max(lengths)
