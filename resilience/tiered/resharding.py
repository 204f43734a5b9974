"""Which parts of saved shards make up the tensors of a rank, whoever saved them. Pure.

Every saved part and every part that a rank owns is a box within a whole tensor. What a
rank lacks is taken from one shard after the other, each value once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from resilience.tiered.shard import TensorPlace


@dataclass(frozen=True, slots=True)
class Box:
    """The values of a whole tensor from `begin` up to `end`, by dim."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of values."""
        pairs = zip(self.begin, self.end, strict=True)
        return math.prod(max(0, end - begin) for begin, end in pairs)

    def within(self, begin: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the box as seen from a part that begins at `begin`."""
        bounds = zip(self.begin, self.end, begin, strict=True)
        return tuple(slice(first - origin, last - origin) for first, last, origin in bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Values that lie in a shard and that a rank lacks."""

    source: TensorPlace
    target: TensorPlace
    box: Box

    def bounds(self, value_bytes: int) -> tuple[int, int]:
        """Return between which bytes of the shard all the values lie, others among them."""
        first = last = 0
        for dim, size in enumerate(self.source.shape):
            first = first * size + self.box.begin[dim] - self.source.begin[dim]
            last = last * size + self.box.end[dim] - 1 - self.source.begin[dim]
        offset = self.source.offset
        return offset + first * value_bytes, offset + (last + 1) * value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """What a rank still lacks of one of its tensors, in boxes that do not overlap."""

    target: TensorPlace
    boxes: tuple[Box, ...]


def box_of(place: TensorPlace) -> Box:
    """Return which part of the whole tensor lies at a place."""
    ends = (begin + size for begin, size in zip(place.begin, place.shape, strict=True))
    return Box(place.begin, tuple(ends))


def lack_all(targets: Iterable[TensorPlace]) -> list[Lack]:
    """Return what a rank lacks that has nothing yet."""
    boxes = ((target, box_of(target)) for target in targets)
    return [Lack(target=target, boxes=(box,)) for target, box in boxes if box.size]


def plan_parts(
    saved: Iterable[TensorPlace], lacking: Sequence[Lack]
) -> tuple[list[Part], list[Lack]]:
    """Return what of a shard's tensors a rank can use, and what it lacks after that.

    Raises ValueError that names the first tensor whose type or whole shape is another.
    """
    places = {each.name: each for each in saved}
    parts: list[Part] = []
    left: list[Lack] = []
    for lack in lacking:
        place = places.get(lack.target.name)
        if place is None:
            left.append(lack)
            continue
        _check_same(place, lack.target)
        there, boxes = box_of(place), []
        for box in lack.boxes:
            common = _intersect(box, there)
            if common is None:
                boxes.append(box)
                continue
            parts.append(Part(source=place, target=lack.target, box=common))
            boxes += _subtract(box, common)
        if boxes:
            left.append(Lack(target=lack.target, boxes=tuple(boxes)))
    return parts, left


def order_shards(own: str, num_own: int, offered: Sequence[str]) -> list[str]:
    """Return the shards that were saved in the order in which a rank tries them.

    Parts follow each other as the numbers of shards do, so those at the same place of the
    whole come first; small tensors may lie farther off. Shards without numbers come as
    they are, the own one first.
    """
    names = sorted(offered, key=lambda each: (each != own, each))
    if not (own.isdecimal() and all(each.isdecimal() for each in names)):
        return names
    names.sort(key=int)
    first = min(int(own) * len(names) // max(1, num_own), len(names) - 1)
    numbers = range(len(names))
    # At equal distance the later one: a rank of fewer owns more than one of them.
    order = sorted(numbers, key=lambda number: (abs(number - first), number < first))
    return [names[number] for number in order]


def _check_same(there: TensorPlace, here: TensorPlace) -> None:
    if (there.dtype, there.full_shape) != (here.dtype, here.full_shape):
        raise ValueError(
            f"the shard has {there.name} as {there.dtype} {list(there.full_shape)}, and this "
            f"rank {here.name} as {here.dtype} {list(here.full_shape)}"
        )


def _intersect(one: Box, other: Box) -> Box | None:
    begin = tuple(map(max, one.begin, other.begin))
    end = tuple(map(min, one.end, other.end))
    common = Box(begin, end)
    return common if common.size else None


def _subtract(box: Box, common: Box) -> Iterator[Box]:
    """Yield boxes that make up what is left of a box without a part of it."""
    begin, end = list(box.begin), list(box.end)
    for dim in range(len(begin)):
        if begin[dim] < common.begin[dim]:
            yield Box(tuple(begin), (*end[:dim], common.begin[dim], *end[dim + 1 :]))
            begin[dim] = common.begin[dim]
        if common.end[dim] < end[dim]:
            yield Box((*begin[:dim], common.end[dim], *begin[dim + 1 :]), tuple(end))
            end[dim] = common.end[dim]
