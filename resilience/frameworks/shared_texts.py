"""A text of each rank, brought to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_HEAD = 8
"""Bytes of a row that say how long its text is."""
_WIDTH_MIN = 1 << 13


def begin_texts(
    own: str, before: Sequence[str], *, rank: int, num_ranks: int, width_min: int = _WIDTH_MIN
) -> Callable[[], list[str]]:
    """Begin to bring texts to all ranks; returns the function that waits for each rank's.

    Both are called by all ranks. `before` has the texts of the time before: the room for a text is
    that of the longest one, with some more, so that one collective is enough for texts that hardly
    grow.
    """
    packed = own.encode()

    def send(width: int) -> tuple[torch.Tensor, dist.Work | None]:
        rows = torch.zeros(num_ranks, _HEAD + width, dtype=torch.uint8)
        row = bytearray(len(packed).to_bytes(_HEAD, "big") + packed[:width])
        rows[rank, : len(row)] = torch.frombuffer(row, dtype=torch.uint8)
        return rows, dist.all_reduce(rows, async_op=True) if num_ranks > 1 else None

    width = max([width_min, *(2 * len(each.encode()) for each in before)])
    rows, work = send(width)

    def end() -> list[str]:
        nonlocal rows, work, width
        while True:
            if work is not None:
                work.wait()
            found = [bytes(each) for each in rows.numpy()]
            lengths = [int.from_bytes(each[:_HEAD], "big") for each in found]
            if max(lengths) <= width:
                texts = zip(found, lengths, strict=True)
                return [each[_HEAD : _HEAD + length].decode() for each, length in texts]
            width = max(lengths)
            rows, work = send(width)

    return end
