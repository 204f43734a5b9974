"""Calls that may hang, each in a thread that can be left behind.

A read of a stuck share, or of a server that has gone silent, ends when the kernel
or the library likes. Whoever waits for it here ends at the deadline instead: the
thread is left to its call, gets no other one, and ends when the call does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from resilience.tiered.errors import TierError

HUNG_MAX = 8
"""Threads that a store leaves behind before it refuses to begin anything more."""

HUNG_RETRY_S = 600.0
"""After so long it lets one more call try whether the store answers again."""

_BYTES_PER_S_MIN = 16 << 20
"""The slowest that bytes may be sent or read, on top of the deadline."""

P = ParamSpec("P")
T = TypeVar("T")

_Job = Callable[[], Any]


class DeadlineError(TierError):
    """The store did not answer in time."""


class Hung:
    """Counts the calls of one store that hang still. Any thread.

    Some may never end. Once another call shows that the store answers, they count no more.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._num = 0
        self._num_pardons = 0
        self._tried_s = 0.0

    def begin(self) -> Callable[[], None]:
        """Count a call that hangs; returns what to call when it has ended after all."""
        with self._lock:
            self._num += 1
            self._tried_s = self._clock()
            num_pardons = self._num_pardons

        def end() -> None:
            with self._lock:
                if num_pardons == self._num_pardons:
                    self._num -= 1

        return end

    def check(self, what: str) -> None:
        """Raise TierError where too many calls hang already, and it is too early to try."""
        with self._lock:
            if self._num < HUNG_MAX:
                return
            if self._clock() - self._tried_s < HUNG_RETRY_S:
                raise TierError(f"{what}: {self._num} earlier calls hang still")
            self._tried_s = self._clock()

    def pardon(self) -> None:
        """Note that the store has answered."""
        with self._lock:
            if self._num >= HUNG_MAX:
                self._num, self._num_pardons = 0, self._num_pardons + 1


class Calls:
    """Makes the blocking calls of one operation, one after the other, in one thread.

    Used by one thread, which closes it. Whatever a call raises is raised as TierError with what was
    being done; after the deadline it is DeadlineError, and no other call is made.
    """

    def __init__(self, what: str, deadline_s: float, hung: Hung, num_bytes: int = 0) -> None:
        hung.check(what)
        self._what = what
        self._deadline_s = deadline_s + num_bytes / _BYTES_PER_S_MIN
        self._hung = hung
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._is_left = False
        self.renew()
        self._thread = threading.Thread(target=self._serve, name="store call", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Begin the deadline anew: the store has done something."""
        self._until_s = time.monotonic() + self._deadline_s

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns, or raise TierError; at the deadline at the latest."""
        if self._is_left:
            raise DeadlineError(f"{self._what}: an earlier call hangs")
        self._jobs.put(lambda: function(*args, **kwargs))
        # Whatever ends the wait, a signal as well, leaves the thread to its call.
        self._is_left = True
        try:
            value, error = self._outcomes.get(timeout=max(0.0, self._until_s - time.monotonic()))
        except Empty:
            raise DeadlineError(f"{self._what}: no answer within {self._deadline_s:g} s") from None
        self._is_left = False
        if error is not None:
            raise TierError(f"{self._what}: {error}") from error
        result: T = value
        return result

    def undo(self, function: Callable[[], None]) -> None:
        """Make a last call whose failure means nothing; behind a call that hangs, when it ends."""
        if self._is_left:
            self._jobs.put(function)
            return
        with suppress(TierError):
            self.call(function)

    def close(self) -> None:
        """Let the thread end, after the call that hangs."""
        if self._is_left:
            self._jobs.put(self._hung.begin())
        else:
            self._hung.pardon()
        self._jobs.put(None)
        if not self._is_left:
            self._thread.join()

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                outcome: tuple[Any, BaseException | None] = (job(), None)
            except BaseException as error:  # noqa: BLE001
                # Panics of a library in Rust are no Exception: the waiting thread raises them.
                outcome = (None, error)
            self._outcomes.put(outcome)
            # Nothing that the call was made with may live as long as this thread waits.
            del job, outcome
