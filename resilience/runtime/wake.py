"""A descriptor by which any thread wakes one that waits for descriptors."""

from __future__ import annotations

import os
from contextlib import suppress


class Wake:
    """A descriptor that is readable from `set` to `clear`; it goes with its last user."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._event

    def set(self) -> None:
        """Make it readable."""
        os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """Make it unreadable."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def __del__(self) -> None:
        # Not before: a thread that is late may still call `set`.
        os.close(self._event)
