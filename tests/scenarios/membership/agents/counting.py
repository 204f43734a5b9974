"""The values that the counting program comes to, whatever happens on the way."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

NUM_VALUES = 4
FACTOR = 6364136223846793005
_BITS = 64


def first(shard: str) -> list[int]:
    """Return the state of a shard before the first step."""
    return [zlib.crc32(f"{shard} {number}".encode()) for number in range(NUM_VALUES)]


def share(step: int, rank: int) -> list[int]:
    """Return what a rank adds in a step."""
    return [step * 1_000_003 + rank * 7919 + number for number in range(NUM_VALUES)]


def digest(values: Sequence[int]) -> str:
    """Return what stands for a state in notes."""
    return hashlib.sha256(repr(list(values)).encode()).hexdigest()[:16]


def digests(shard: str, *, num_ranks: int, num_steps: int) -> list[str]:
    """Return the digest of a shard before each step, and after the last one."""
    values = first(shard)
    found = [digest(values)]
    for step in range(num_steps):
        shares = [share(step, rank) for rank in range(num_ranks)]
        values = [
            _wrap(value * FACTOR + sum(added))
            for value, *added in zip(values, *shares, strict=True)
        ]
        found.append(digest(values))
    return found


def _wrap(value: int) -> int:
    """Return a number as an integer of 64 bits holds it."""
    half = 1 << (_BITS - 1)
    return (value + half) % (1 << _BITS) - half
