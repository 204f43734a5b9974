"""What a producer knows, and the loop that makes batches.

The process's main thread calls the source, as some loaders want that, and stores and deletes. A
second thread speaks for the consumers; it never waits for the main one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from resilience.data.errors import CacheFolderError, CacheFullError
from resilience.data.failure import Failure, describe_failure, encode_failure
from resilience.data.producer_segments import ProducerSegments
from resilience.data.streams import Made, Streams
from resilience.data.window import Plan, Reader, Window, WindowLimits, plan
from resilience.data.wire import ProducerMessage


@dataclass(eq=False, kw_only=True)
class Consumer:
    """A consumer that is connected."""

    send: Callable[[ProducerMessage], None]
    """The call must neither block nor raise."""
    position: int
    is_waiting: bool = False

    def move(self, number: int, *, is_waiting: bool) -> None:
        """Stand at a batch from now on."""
        self.position, self.is_waiting = number, is_waiting

    def answer(self, message: ProducerMessage) -> None:
        """Send what the consumer waits for."""
        self.is_waiting = False
        self.send(message)


@dataclass(kw_only=True)
class _Failed:
    """A batch that cannot be had, until it is tried again."""

    failure: Failure
    told: set[Consumer] = field(default_factory=set)


class Production:
    """The batches of one cache, as its consumers ask for them."""

    def __init__(
        self,
        *,
        limits: WindowLimits,
        first: int,
        checkpoint: int | None,
        segments: ProducerSegments,
        streams: Streams,
        lock: threading.RLock,
        is_refusing: bool = False,
    ) -> None:
        """`first` is where the consumer that is expected begins, `checkpoint` where a resume would.

        `lock` is that of the segments. `is_refusing`: the source cannot be opened in this process.
        A consumer that asks again after it was told so is left to another producer, which may be
        able to.
        """
        self._limits = limits
        self._segments = segments
        self._streams = streams
        self._changed = threading.Condition(lock)
        self._consumers: list[Consumer] = []
        self._left = [first]
        self._checkpoint = checkpoint
        self._end: int | None = None
        self._failed: dict[int, _Failed] = {}
        self._batch_bytes = 0
        self._room_bytes = limits.budget_bytes
        self._full: CacheFullError | None = None
        self._activity = "starts"
        self._has_warned = False
        self._is_over = False
        self._is_refusing = is_refusing
        self._has_refused = False
        self._planned = range(0)
        """Batches that can be made without another plan, until something changes."""
        self._may_begin = True
        """Whether the plan has counted on a new segment, if the open one has no room."""

    # What the consumers' thread calls.

    def arrive(self, send: Callable[[ProducerMessage], None], number: int) -> Consumer:
        """Take in a consumer that begins at a batch, in the place of one that has left."""
        consumer = Consumer(send=send, position=number)
        with self._changed:
            if self._left:
                self._left.remove(min(self._left, key=lambda each: abs(each - number)))
            self._consumers.append(consumer)
            # A new one comes after an error perhaps, and then that is to be tried again.
            self._failed = {n: each for n, each in self._failed.items() if not each.told}
            self._note_change()
        return consumer

    def leave(self, consumer: Consumer, *, is_coming_back: bool) -> None:
        """Let a consumer go; the place of the last one is kept in any case."""
        with self._changed:
            self._consumers.remove(consumer)
            position = 0 if self._limits.is_validation else consumer.position
            if is_coming_back or not (self._consumers or self._left):
                self._left.append(position)
            self._note_change()

    def move(self, consumer: Consumer, number: int) -> None:
        """Take note of the batch that a consumer has read."""
        with self._changed:
            consumer.move(number, is_waiting=False)
            self._note_change()

    def ask(self, consumer: Consumer, number: int) -> None:
        """Answer a consumer that waits for a batch, now or as soon as there is an answer."""
        with self._changed:
            consumer.move(number, is_waiting=True)
            self._is_over |= self._has_refused
            failed = self._failed.get(number)
            if failed is not None and consumer in failed.told:
                del self._failed[number]
            self._answer(consumer)
            self._note_change()

    def doubt(self, number: int) -> None:
        """Check a batch that a consumer has found damaged, so that it is made again.

        Where the key is damaged this producer ends, and the next one makes another key.
        """
        with self._changed:
            if not self._segments.is_readable():
                self._is_over = True
                self._changed.notify()
            elif self._segments.is_damaged(number):
                self._planned = range(0)

    def note_checkpoint(self, number: int) -> None:
        """Take note that a resume begins at a batch, and not before."""
        with self._changed:
            self._checkpoint = number
            self._note_change()

    def explain(self) -> str:
        """Return what happens now, for a person."""
        with self._changed:
            return self._activity

    def stop(self) -> None:
        """Make `run` return as soon as the source does."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    # What the main thread calls.

    def run(self) -> None:
        """Make batches until `stop` is called."""
        while (number := self._wait()) is not None:
            if self._streams.made(number) is None:
                self._take(number)
            made = self._streams.made(number)
            if made is None or not self._place(made):
                self._planned = range(0)

    def close(self) -> None:
        """Close what `run` has opened."""
        self._streams.close()
        self._segments.close()

    def _wait(self) -> int | None:
        """Return the number of the batch to be made now; None when it is over."""
        with self._changed:
            while not self._is_over:
                if self._planned:
                    number, self._planned = self._planned[0], self._planned[1:]
                    self._may_begin = False
                    return number
                planned = self._plan()
                self._segments.evict(planned.evict)
                self._warn(planned)
                if planned.produce is not None:
                    self._may_begin = True
                    self._planned = range(planned.produce + 1, planned.produce + planned.count)
                    return planned.produce
                self._activity = planned.reason
                if planned.evict:
                    continue  # There may be room now.
                blocked = planned.blocked
                if blocked is not None and self._is_of_unknown_size(blocked):
                    self._batch_bytes = 0
                    continue
                error = None if blocked is None else self._why_no_room(blocked)
                if blocked is not None and error is not None:
                    self._fail(blocked, error)
                    continue
                self._changed.wait()
        return None

    def _plan(self) -> Plan:
        readers = [
            Reader(position=each.position, is_waiting=each.is_waiting) for each in self._consumers
        ]
        readers += [Reader(position=each, is_connected=False) for each in self._left]
        size = self._batch_bytes
        return plan(
            Window(
                limits=self._limits,
                room_bytes=self._room_bytes,
                spans=tuple(self._segments.spans.values()),
                readers=tuple(readers),
                checkpoint=self._checkpoint,
                end=self._end,
                failed=frozenset(self._failed),
                batch_bytes=size,
                segment_bytes=self._segments.segment_bytes(size) if size else 0,
            )
        )

    def _take(self, number: int) -> None:
        """Take a batch from the source, which may take any time, fail, or be at its end."""
        is_open = self._streams.is_open_at(number)
        self._activity = f"waits for the source's batch {number}"
        if not is_open:
            self._activity = f"opens the source at batch {number}"
        try:
            end = self._streams.take(number)
        except Exception as error:  # noqa: BLE001 - whatever it is, the consumer gets it
            self._streams.drop(number)
            self._fail(number, error)
            return
        if end is not None:
            self._streams.drop(number)
            with self._changed:
                self._end = end if self._end is None else min(end, self._end)
                self._answer_all()

    def _place(self, made: Made) -> bool:
        """Store a batch and answer its consumers; False where the plan has to be made anew."""
        if made.num_bytes != self._batch_bytes:
            # Only now it is known what room is needed, which the plan depends on.
            self._batch_bytes = made.num_bytes
            return False
        if not (self._may_begin or self._segments.has_room(made)):
            return False
        self._activity = f"stores batch {made.number}"
        try:
            serial = self._segments.store(made)
        except CacheFullError as error:
            self._tighten(made, error)
            return False
        except CacheFolderError as error:
            self._fail(made.number, error)
            return False
        if serial is None:
            return False
        self._streams.advance(made.number)
        with self._changed:
            self._failed.pop(made.number, None)
            self._answer_all()
        return True

    def _is_of_unknown_size(self, number: int) -> bool:
        """Return whether a batch seems too large only because the last one was."""
        return bool(self._batch_bytes) and self._full is None and self._streams.made(number) is None

    def _why_no_room(self, number: int) -> CacheFullError | None:
        """Return why a batch cannot be stored, None where there may be room later."""
        made = self._streams.made(number)
        if self._full is not None or made is None:
            return self._full
        needed = self._segments.segment_bytes(made.num_bytes)
        if needed <= self._limits.budget_bytes:
            return None
        return CacheFullError(
            f"batch {number} takes {needed} bytes with its segment, the budget is "
            f"{self._limits.budget_bytes}; set resilience.mmap.budget_mib to "
            f"{-(-needed >> 20)} or more, better to many times that"
        )

    def _tighten(self, made: Made, error: CacheFullError) -> None:
        """Plan with what the file system has room for, until a consumer has moved on."""
        with self._changed:
            self._full = error
            if not self._segments.is_tight:
                self._segments.tighten()
                return
            used = sum(span.num_bytes for span in self._segments.spans.values())
            self._room_bytes = used + self._segments.segment_bytes(made.num_bytes) - 1

    def _fail(self, number: int, error: Exception) -> None:
        with self._changed:
            self._failed[number] = _Failed(failure=describe_failure(error))
            self._answer_all()

    def _note_change(self) -> None:
        """Have the main thread plan anew; the caller has the lock."""
        self._planned = range(0)
        if self._full is not None:
            # Others may have given room back meanwhile.
            self._full = None
            self._segments.loosen()
            self._room_bytes = self._limits.budget_bytes
        self._changed.notify()

    def _answer_all(self) -> None:
        for consumer in self._consumers:
            self._answer(consumer)

    def _answer(self, consumer: Consumer) -> None:
        """Tell a consumer what it waits for, if there is an answer; the caller has the lock."""
        if not consumer.is_waiting or self._is_over:
            return
        number = consumer.position
        serial = self._segments.serial_of(number)
        failed = self._failed.get(number)
        if serial is not None:
            message = ProducerMessage("published", number, str(serial))
        elif failed is not None:
            failed.told.add(consumer)
            self._has_refused = self._is_refusing
            message = ProducerMessage("failed", number, encode_failure(failed.failure))
        elif self._end is not None and number >= self._end:
            message = ProducerMessage("end", self._end)
        else:
            return
        consumer.answer(message)

    def _warn(self, planned: Plan) -> None:
        if planned.is_short and not self._has_warned:
            self._has_warned = True
            print(  # noqa: T201 - standard error is the producer's only way to a person
                f"batch cache: {planned.reason}, so a resume from an older checkpoint may have "
                "to wait for its batches; raise resilience.mmap.budget_mib",
                file=sys.stderr,
                flush=True,
            )
