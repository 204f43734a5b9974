"""What the daemon says to whoever looks after it."""

from __future__ import annotations

import sys
from contextlib import suppress


def complain(text: str) -> None:
    """Tell whoever looks after the daemon."""
    with suppress(OSError, ValueError):  # nobody reads
        sys.stderr.write(f"resilience.tiered.memoryd: {text}\n")
        sys.stderr.flush()
