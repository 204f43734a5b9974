"""Seconds within a test that are not its own: what it makes, or waits for, on behalf of others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Clock:
    total_s = 0.0
    depth = 0


@contextmanager
def apart() -> Iterator[None]:
    """Count the seconds of the block apart."""
    _Clock.depth += 1
    begin_s = time.monotonic()
    try:
        yield
    finally:
        _Clock.depth -= 1
        if not _Clock.depth:
            _Clock.total_s += time.monotonic() - begin_s


def seconds_apart() -> float:
    """Return the seconds of all blocks of this process so far."""
    return _Clock.total_s
