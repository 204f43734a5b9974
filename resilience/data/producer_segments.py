"""The segments of a cache, as its producer keeps them: found again, begun, filled, deleted."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from resilience.data.errors import DamagedBatchError
from resilience.data.format import file_bytes
from resilience.data.segments import (
    Sealer,
    SegmentReader,
    SegmentWriter,
    remove_partial,
    segment_path,
)
from resilience.data.states import prune_states
from resilience.data.store import SegmentStore
from resilience.data.streams import Made
from resilience.data.window import Span

_ENTRIES_MAX = 64
"""So many batches a segment, that one seldom has to be begun, mapped and deleted."""
_SEGMENTS_MAX = 512
"""So many segments hold the budget, whatever the batches' size: each takes a descriptor of all
who read it, of which a process often has 1,024."""
_SEGMENT_BYTES_MAX = 64 << 20
_SEGMENTS_OF_BUDGET = 8
"""So many segments fit into the budget, so that old ones can go while new ones come."""


class ProducerSegments:
    """The segments of one cache. Only its producer has one.

    Of its two threads one writes; the other takes away what is damaged. `lock` guards `spans`.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        *,
        sealer: Sealer | None,
        budget_bytes: int,
        lock: threading.RLock,
    ) -> None:
        self.spans: dict[int, Span] = {}
        self.is_tight = False
        """Whether the file system had no room; segments then hold a single batch."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._sealer = sealer
        self._bytes_max = min(_SEGMENT_BYTES_MAX, budget_bytes // _SEGMENTS_OF_BUDGET)
        self._bytes_min = min(self._bytes_max, budget_bytes // _SEGMENTS_MAX)
        self._lock = lock
        self._writer: SegmentWriter | None = None
        self._serial = 0
        self._num_entries_open = 0

    def tighten(self) -> None:
        """Give each later segment room for a single batch."""
        self.is_tight = True

    def loosen(self) -> None:
        """Give later segments room for many batches again."""
        self.is_tight = False

    def find(self) -> None:
        """Take over what an earlier producer has left; what is damaged is deleted."""
        remove_partial(self._folder)
        with closing(SegmentStore(self._folder, self._fingerprint, sealer=self._sealer)) as store:
            store.refresh()
            self._serial = store.next_serial - 1
            for serial in list(store.damaged):
                store.delete(serial)
            for segment in store.segments:
                span = _take_over(segment)
                if span is None:
                    store.delete(segment.serial)
                else:
                    self.spans[span.serial] = span

    def segment_bytes(self, batch_bytes: int) -> int:
        """Return what a new segment takes that begins with a batch of this size."""
        return file_bytes(self._num_entries(batch_bytes), batch_bytes)

    def has_room(self, made: Made) -> bool:
        """Return whether a batch fits into the segment being written. For the same thread."""
        with self._lock:
            span = self.spans.get(self._serial) if self._writer else None
        return span is not None and span.end == made.number and made.num_bytes <= span.free_bytes

    def store(self, made: Made) -> int | None:
        """Store a batch and return the segment's serial; None where the segment was taken away.

        Raises CacheFullError where the file system has no room, CacheFolderError where the
        folder cannot be written to.
        """
        if not self.has_room(made):
            self._begin(made)
        writer = self._writer
        if writer is None or not writer.append(made.number, made.description, made.arrays):
            raise AssertionError(f"batch {made.number} does not fit where there was room for it")
        with self._lock:
            span = self.spans.get(self._serial)
            if span is None:
                return None
            end = made.number + 1
            is_full = end - span.first == self._num_entries_open
            # Rather too little than too much.
            free_bytes = 0 if is_full else span.free_bytes - made.num_bytes
            self.spans[self._serial] = replace(span, end=end, free_bytes=free_bytes)
        return self._serial

    def evict(self, serials: tuple[int, ...]) -> None:
        """Delete segments; a process that has one mapped keeps it. For the thread that writes."""
        for serial in serials:
            if serial == self._serial:
                self.close()
            with self._lock:
                self.spans.pop(serial, None)
            segment_path(self._folder, serial).unlink(missing_ok=True)
        if serials and self.spans:
            prune_states(self._folder, min(each.first for each in self.spans.values()))

    def is_damaged(self, number: int) -> bool:
        """Return whether a batch cannot be read; the newest segment that should hold it then goes.

        What the segment still held is made again when it is needed. For any thread.
        """
        with self._lock:
            span = self._holding(number)
            if span is None:
                return True
            try:
                path = segment_path(self._folder, span.serial)
                with SegmentReader.open(path, self._fingerprint, sealer=self._sealer) as segment:
                    segment.read(number)
            except (DamagedBatchError, KeyError, FileNotFoundError):
                del self.spans[span.serial]
                segment_path(self._folder, span.serial).unlink(missing_ok=True)
                return True
        return False

    def is_readable(self) -> bool:
        """Return whether consumers can read what is stored here, as far as encryption goes."""
        return self._sealer is None or self._sealer.is_current()

    def serial_of(self, number: int) -> int | None:
        """Return the newest segment that holds a batch."""
        with self._lock:
            span = self._holding(number)
        return span.serial if span else None

    def close(self) -> None:
        """Close the segment that is being written; a second call does nothing."""
        if self._writer is None:
            return
        self._writer.close()
        with self._lock:
            span = self.spans.get(self._serial)
            if span is not None:
                self.spans[self._serial] = replace(
                    span, num_bytes=self._writer.num_bytes, free_bytes=0
                )
        self._writer = None

    def _holding(self, number: int) -> Span | None:
        holding = (each for each in self.spans.values() if each.first <= number < each.end)
        return max(holding, key=lambda each: each.serial, default=None)

    def _begin(self, made: Made) -> None:
        self.close()
        num_entries = self._num_entries(made.num_bytes)
        num_bytes = file_bytes(num_entries, made.num_bytes)
        self._writer = SegmentWriter.create(
            self._folder,
            self._serial + 1,
            made.number,
            self._fingerprint,
            num_entries=num_entries,
            num_bytes=num_bytes,
            sealer=self._sealer,
        )
        self._serial += 1
        self._num_entries_open = num_entries
        span = Span(
            serial=self._serial,
            first=made.number,
            end=made.number,
            num_bytes=num_bytes,
            free_bytes=num_entries * made.num_bytes,
        )
        with self._lock:
            self.spans[self._serial] = span

    def _num_entries(self, batch_bytes: int) -> int:
        if self.is_tight:
            return 1
        batch_bytes = max(1, batch_bytes)
        num_entries = max(_ENTRIES_MAX, self._bytes_min // batch_bytes)
        return max(1, min(num_entries, self._bytes_max // batch_bytes))


def _take_over(segment: SegmentReader) -> Span | None:
    """Return a found segment as a span, without what it had not used; None for a useless one."""
    with suppress(DamagedBatchError):
        segment.trim()
        numbers = segment.numbers
        if numbers:
            return Span(
                serial=segment.serial,
                first=numbers.start,
                end=numbers.stop,
                num_bytes=segment.num_bytes,
            )
    return None
