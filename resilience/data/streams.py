"""The sources that a producer has open, and the batches that it has taken from them.

Two sources are open at most: one goes on at the front, the other makes again what lies behind. So a
batch that was damaged does not cost the place at the front.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from resilience.data.format import record_bytes
from resilience.data.sources import OpenSource, SourceState
from resilience.data.states import EVERY
from resilience.data.tree import flatten


@dataclass(frozen=True, slots=True)
class Made:
    """A batch that was taken from a source and is not stored yet."""

    number: int
    description: bytes
    arrays: list[Any]
    num_bytes: int
    """What it takes in a segment."""


class _Stream:
    def __init__(self, source: OpenSource, number: int) -> None:
        self.source = source
        self.number = number
        """Number of the batch that it has or yields next."""
        self.made: Made | None = None


class Streams:
    """Batches by number. One thread; what the sources raise goes through."""

    def __init__(
        self,
        open_at: Callable[[int], OpenSource],
        *,
        keep_state: Callable[[SourceState], None],
        is_sealed: bool,
    ) -> None:
        """Take sources from `open_at`; `keep_state` gets their states from time to time."""
        self._open_at = open_at
        self._keep_state = keep_state
        self._is_sealed = is_sealed
        self._streams: list[_Stream] = []

    def made(self, number: int) -> Made | None:
        """Return a batch that was taken already."""
        stream = self._find(number)
        return stream.made if stream else None

    def is_open_at(self, number: int) -> bool:
        """Return whether a batch can be taken without opening a source."""
        return self._find(number) is not None

    def take(self, number: int) -> int | None:
        """Take a batch, which may take any time; `made` has it afterwards.

        Returns None, or the number after the last batch where the stage ends before it.
        """
        stream = self._find(number) or self._open(number)
        if stream.source.next_batch < number:
            return stream.source.next_batch
        state = stream.source.read_state() if number % EVERY == 0 else None
        try:
            batch = next(stream.source)
        except StopIteration:
            return number
        description, arrays = flatten(batch)
        num_bytes = record_bytes(description, arrays, is_sealed=self._is_sealed)
        if state is not None:
            # It saves a later producer time, no more: on a full file system there is none.
            with suppress(OSError):
                self._keep_state(state)
        stream.made = Made(number, description, arrays, num_bytes)
        return None

    def advance(self, number: int) -> None:
        """Go on behind a batch that is stored."""
        stream = self._find(number)
        if stream is not None:
            stream.made = None
            stream.number += 1

    def drop(self, number: int) -> None:
        """Close the source that failed at a batch; it is opened anew when it is asked again."""
        stream = self._find(number)
        if stream is not None:
            self._streams.remove(stream)
            stream.source.close()

    def close(self) -> None:
        """Close all sources."""
        while self._streams:
            self._streams.pop().source.close()

    def _find(self, number: int) -> _Stream | None:
        return next((each for each in self._streams if each.number == number), None)

    def _open(self, number: int) -> _Stream:
        """Open a source at a batch; the one at the front stays where it is ahead of that."""
        front = max(self._streams, key=lambda each: each.number, default=None)
        for stream in list(self._streams):
            if stream is not front or stream.number < number:
                self._streams.remove(stream)
                stream.source.close()
        stream = _Stream(self._open_at(number), number)
        self._streams.append(stream)
        return stream
