"""What a store is made of: named objects, in a bucket or in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from resilience.tiered.errors import TierError

BLOCK_BYTES = 4 << 20
"""How much of a piece is handed over in one call."""


class Stored(NamedTuple):
    """One object as a listing shows it."""

    name: str
    num_bytes: int
    changed_s: float
    """When it was written, in seconds of the epoch, by the store's clock."""


class Objects(Protocol):
    """Named objects, which `Store` makes a store of. Any thread; blocks; TierError."""

    def write(self, name: str, num_bytes: int, pieces: Iterable[memoryview]) -> None:
        """Write an object, or replace it; it appears at once and whole, or not at all."""

    def read(self, name: str, num_bytes: int, begin: int, into: memoryview) -> None:
        """Fill `into` from an object of exactly `num_bytes`; TierError where there is none."""

    def find(self, name: str) -> Stored | None:
        """Return what is known of an object; None where there is none."""

    def find_all(self, prefix: str) -> list[Stored]:
        """Return all objects whose names begin so, in any order."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are not there are left out."""

    def clean(self, namespace: str) -> None:
        """Remove what writers of this namespace left that are dead."""


def blocks_of(pieces: Iterable[memoryview], num_bytes: int, what: str) -> Iterator[memoryview]:
    """Yield the pieces' bytes in blocks; TierError where they are not `num_bytes` in all."""
    total = 0
    for piece in pieces:
        flat = piece.cast("B")
        total += flat.nbytes
        if total > num_bytes:
            raise TierError(f"{what}: more than the {num_bytes} bytes that were announced")
        for begin in range(0, flat.nbytes, BLOCK_BYTES):
            yield flat[begin : begin + BLOCK_BYTES]
    if total != num_bytes:
        raise TierError(f"{what}: {total} bytes of the {num_bytes} that were announced")
