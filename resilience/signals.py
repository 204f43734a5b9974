"""Signals as bytes of a file, for one who waits for them among other things."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""


@contextmanager
def caught_signals(*numbers: int) -> Iterator[int]:
    """Yield a file that becomes readable when one of these signals comes; main thread only.

    Within the block they do nothing else. `signal.sigtimedwait` is no way to wait for them: after
    the process has stood still it may return what never came (CPython 3.10 to 3.13).
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with ExitStack() as stack:
        for file in (reader, writer):
            stack.callback(os.close, file)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, before)
        for number in numbers:
            # Nothing is left to do: the file has the number already.
            before_it = signal.signal(number, lambda number, frame: None)
            stack.callback(signal.signal, number, before_it)
        # Those that came before wait: an agent starts a daemon so, and see `delayed_signals`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        yield reader


@contextmanager
def delayed_signals(*numbers: int) -> Iterator[None]:
    """Delay these signals to the end of the block, or until `caught_signals`; main thread only."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def read_signals(file: int) -> tuple[int, ...]:
    """Return the signals that came since the last call, oldest first."""
    try:
        return tuple(os.read(file, 64))
    except BlockingIOError:
        return ()
