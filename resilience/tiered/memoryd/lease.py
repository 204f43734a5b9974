"""How long a daemon goes on without an agent that supervises it.

A daemon that an agent has started outlives that agent by its lease, so that the node's next
agent finds it with all it holds. One without a lease goes on until it is told to end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from resilience.tiered.errors import LostError, RefusedError
from resilience.tiered.memoryd.output import complain


class Lease:
    """The agent that supervises the daemon, one at a time. Any thread.

    `expire` is called, by a thread of the lease, when no agent has held it for `lease_s`.
    """

    def __init__(self, lease_s: float | None, expire: Callable[[], None]) -> None:
        self._lease_s = lease_s
        self._expire = expire
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._num_counts = 0
        self._holder: object = None
        self._lose: Callable[[], None] | None = None
        self._is_over = False

    @property
    def is_held(self) -> bool:
        """Return whether an agent supervises the daemon."""
        with self._lock:
            return self._holder is not None

    def start(self) -> None:
        """Begin to count: the agent is yet to come."""
        with self._lock:
            if self._holder is None:
                self._count()

    def take(self, holder: object, lose: Callable[[], None]) -> None:
        """Have an agent hold the lease, and call the `lose` of the one that held it before.

        Raises LostError where the daemon is about to end, RefusedError where it has no lease.
        """
        with self._lock:
            if self._lease_s is None:
                raise RefusedError("the daemon has no lease, so no agent has to supervise it")
            if self._is_over:
                raise LostError("the daemon is about to end")
            self._stop_counting()
            before, self._holder, self._lose = self._lose, holder, lose
        if before is not None:
            before()

    def drop(self, holder: object) -> None:
        """Note that an agent is gone; a no-op for one that does not hold the lease."""
        with self._lock:
            if self._holder is holder:
                self._holder = self._lose = None
                self._count()

    def end(self) -> None:
        """Let no further agent in: the daemon is about to end."""
        with self._lock:
            self._is_over = True
            self._stop_counting()

    def _count(self) -> None:
        self._stop_counting()
        if self._lease_s is not None and not self._is_over:
            self._timer = threading.Timer(self._lease_s, self._run_out, (self._num_counts,))
            self._timer.daemon = True
            self._timer.start()

    def _stop_counting(self) -> None:
        self._num_counts += 1
        if self._timer is not None:
            self._timer.cancel()

    def _run_out(self, number: int) -> None:
        with self._lock:
            if number != self._num_counts:
                return
            self._is_over = True
        complain(f"no agent has come back for {self._lease_s:g} s; the daemon ends")
        self._expire()
