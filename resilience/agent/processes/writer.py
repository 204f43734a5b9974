"""Writes to one destination in a thread of its own: who has something to write never waits for it.

`Backlog` decides what waits and what is dropped, and is pure. `Writer` is the thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LIMIT_BYTES = 16 << 20
"""What may wait for one destination before workers' lines are dropped: they can say no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Whole lines that are written at once."""

    lines: bytes = b""
    file: str = ""
    """Which of the destination's files, where it has several."""
    is_kept: bool = True
    """It is never dropped, and waits in memory however much there is of it."""
    num_dropped: int = 0
    """How many lines were dropped in the place of this piece, which has none then."""


class Backlog:
    """What waits to be written, oldest first.

    Where more than `limit_bytes` would wait, pieces that are not kept are dropped. In the place of
    the first of them stands a piece that counts the lines. Until that one is taken, all further
    pieces of its file that are not kept are dropped as well: the gap has one place.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.num_lines = 0
        """Lines that were not dropped, and of which nobody has said that they are written."""
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._waiting: deque[Piece] = deque()
        self._dropped: dict[str, int] = {}
        """Lines in the gap of each file that has one."""

    @property
    def has_more(self) -> bool:
        """Return whether there is something to take."""
        return bool(self._waiting)

    def add(self, piece: Piece) -> None:
        """Take in a piece, or drop it."""
        if not piece.is_kept and not self._has_room(piece):
            if piece.file not in self._dropped:
                self._waiting.append(Piece(file=piece.file, num_dropped=1))
            num_before = self._dropped.get(piece.file, 0)
            self._dropped[piece.file] = num_before + _count_lines(piece)
            return
        self._waiting.append(piece)
        self._num_bytes += len(piece.lines)
        self.num_lines += _count_lines(piece)

    def take(self) -> Piece | None:
        """Return what is to be written next, None where nothing waits; it still counts."""
        if not self._waiting:
            return None
        piece = self._waiting.popleft()
        if piece.num_dropped:
            return Piece(file=piece.file, num_dropped=self._dropped.pop(piece.file))
        return piece

    def settle(self, piece: Piece) -> None:
        """Note that a piece which was taken is written."""
        self._num_bytes -= len(piece.lines)
        self.num_lines -= _count_lines(piece)

    def _has_room(self, piece: Piece) -> bool:
        is_full = self._num_bytes + len(piece.lines) > self._limit_bytes
        return piece.file not in self._dropped and not is_full


class Writer:
    """Writes pieces to one destination in the order in which they came."""

    def __init__(self, write: Callable[[Piece], None], limit_bytes: int = LIMIT_BYTES) -> None:
        """Write with `write`, which may take any time and raises nothing."""
        self._write = write
        self._backlog = Backlog(limit_bytes)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_writing = False

    def put(self, piece: Piece) -> None:
        """Have a piece written; waits for nothing."""
        with self._changed:
            self._backlog.add(piece)
            if self._thread is None:
                # Not before: a process that has threads cannot be forked safely.
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, deadline_s: float) -> int:
        """Wait until all is written, at most to `deadline_s` of the monotonic clock.

        Returns how many lines are not; what is put from now on may be lost.
        """
        with self._changed:
            timeout_s = max(0.0, deadline_s - time.monotonic())
            self._changed.wait_for(lambda: not self._is_busy(), timeout_s)
            self._is_closed = True
            self._changed.notify_all()
            return self._backlog.num_lines

    def _is_busy(self) -> bool:
        return self._is_writing or self._backlog.has_more

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog.has_more or self._is_closed)
                piece = self._backlog.take()
                if piece is None:
                    return
                self._is_writing = True
            self._write(piece)
            with self._changed:
                self._backlog.settle(piece)
                self._is_writing = False
                self._changed.notify_all()


def _count_lines(piece: Piece) -> int:
    return piece.lines.count(b"\n")
