"""Parts of the tensors of Hugging Face's layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

Index = tuple[int | slice, ...]
Part = tuple[slice, ...]
"""A range of each of the first axes."""


def split_index(index: Index) -> tuple[Part, Index]:
    """Return a range of each axis that covers an index, and the index within them.

    Indices that take turns along an axis have the same range.
    """
    covering: list[slice] = []
    within: list[int | slice] = []
    for each in index or (slice(None),):
        if isinstance(each, int):
            covering.append(slice(each, each + 1))
            within.append(0)
        else:
            first = (each.start or 0) % (each.step or 1)
            covering.append(slice((each.start or 0) - first, each.stop))
            within.append(slice(first, None, each.step))
    return tuple(covering), tuple(within)


def find_gap(parts: Mapping[str, Iterable[Index]], known: Mapping[str, tuple[int, ...]]) -> str:
    """Return which of the tensors is not made up of its parts, in words; "" where all are.

    A part may be there more than once.
    """
    for name, shape in known.items():
        boxes = {_box(index, shape) for index in parts.get(name, ())}
        found, total = sum(math.prod(map(len, box)) for box in boxes), math.prod(shape)
        if found != total:
            return f"{found:,} of the {total:,} values of {name!r}"
    return ""


def count_values(index: Index, shape: tuple[int, ...]) -> int:
    """Return how many values an index takes of a tensor."""
    return math.prod(map(len, _box(index, shape)))


def _box(index: Index, shape: tuple[int, ...]) -> tuple[range, ...]:
    whole = [range(size) for size in shape]
    own = [
        axis[slice(i, i + 1) if isinstance(i, int) else i]
        for i, axis in zip(index, whole, strict=False)
    ]
    return (*own, *whole[len(index) :])
