"""Signals that ask a worker to end, between steps once there are steps.

Before and after the steps SIGTERM ends the worker where it is. While the steps run it is only
noted, because all workers have to stop after the same one. SIGUSR1 is only noted as well.
A worker of an agent that recovers ignores a SIGTERM that the agent did not send.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from resilience.inprocess.asked import is_asked_to_end

EXIT_STATUS = 128 + signal.SIGTERM


class StopSignal:
    """Notes SIGTERM, or raises SystemExit with status 143 on it."""

    def __init__(self) -> None:
        self.is_requested = False
        self.last_step: int | None = None
        """The newest step that this worker has finished."""
        self._is_deferred = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Take SIGTERM from now on; main thread only."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def note_step(self, step: int) -> None:
        """Note the newest step that this worker has finished."""
        self.last_step = step

    def defer(self) -> None:
        """Only note the signal until `release`."""
        self._is_deferred = True

    def release(self) -> None:
        """End the worker at once from now on, also for a signal noted before."""
        self._is_deferred = False
        if self.is_requested:
            raise SystemExit(EXIT_STATUS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A child that was forked has the handler, and may be ended by this process.
        if os.getpid() == self._pid and not is_asked_to_end():
            return
        self.is_requested = True
        if not self._is_deferred:
            raise SystemExit(EXIT_STATUS)


class LeaveSignal:
    """Notes SIGUSR1: the run is to save its state, and to go on at another size."""

    def __init__(self) -> None:
        self.is_requested = False

    def install(self) -> None:
        """Take SIGUSR1 from now on, which ended the process until then; main thread only."""
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
