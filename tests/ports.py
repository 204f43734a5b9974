"""Ports for servers that are told their numbers."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from launcher.clusters.ports import hold_ports

_held = ExitStack()
atexit.register(_held.close)


def free_ports(number: int) -> tuple[int, ...]:
    """Return ports that no other test gets while this process lives, nor the kernel gives away."""
    return _held.enter_context(hold_ports(number))
