"""A shuffled order that is computed index by index. Pure; nothing here is as large as the data."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_NUM_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of 0..size-1 that is computed index by index.

    A Feistel network over the next even power of two; an image outside the
    range is sent through it again, fewer than four times on average.
    """

    size: int
    keys: tuple[int, ...]

    def __call__(self, index: int) -> int:
        """Return the image of `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside 0 to {self.size - 1}")
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        image = self._encrypt(index, half_bits)
        while image >= self.size:
            image = self._encrypt(image, half_bits)
        return image

    def _encrypt(self, value: int, half_bits: int) -> int:
        mask = (1 << half_bits) - 1
        left, right = value >> half_bits, value & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half_bits) | right


@functools.lru_cache(maxsize=8)
def make_permutation(*, size: int, seed: int, epoch: int) -> Permutation:
    """Return the order of one epoch of `size` samples."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    words = (digest[start : start + 8] for start in range(0, len(digest), 8))
    return Permutation(size, tuple(int.from_bytes(word, "little") for word in words))


def _mix(value: int) -> int:
    """Return the splitmix64 finaliser of a 64-bit number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
