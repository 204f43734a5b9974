"""Waits for what other processes do by themselves, of which nothing tells a test."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 60.0


def wait_until(
    is_so: Callable[[], object],
    tell: Callable[[], object] = str,
    *,
    limit_s: float = LIMIT_S,
    pause_s: float = 0.01,
) -> None:
    """Ask until it is so; a failure shows what `tell` returns."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, tell()
        time.sleep(pause_s)
