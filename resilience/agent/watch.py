"""What the agent's one thread waits for, and what it does when something is there."""

from __future__ import annotations

import selectors
from collections.abc import Callable


class Watch:
    """Files and what to call when they can be read."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def add(self, what: object, callback: Callable[[], None]) -> None:
        """Call back whenever `what`, a descriptor or its owner, can be read or has ended."""
        self.selector.register(what, selectors.EVENT_READ, callback)  # type: ignore[arg-type]

    def watch_writing(self, file: int, *, is_wanted: bool) -> None:
        """Call back for a descriptor also, or no longer, when it can be written."""
        key = self.selector.get_map().get(file)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_wanted else 0)
        if key is not None and key.events != events:
            self.selector.modify(file, events, key.data)

    def drop(self, file: int) -> None:
        """Wait for a descriptor no longer; one that nobody waits for is no mistake."""
        try:
            self.selector.unregister(file)
        except (KeyError, ValueError):
            return

    def serve(self, timeout_s: float) -> None:
        """Wait for something, at most so long, and do what is to be done about it.

        What one callback closes is not there for the next one, though it was readable.
        """
        for key, _ in self.selector.select(timeout_s):
            if self.selector.get_map().get(key.fd) is key:
                key.data()
