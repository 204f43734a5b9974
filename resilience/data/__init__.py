"""Batches that survive restarts: a cache in mapped files, filled ahead by a process of its own.

`cached` wraps a dataloader. Importing the package costs nothing: what it gives is loaded when it
is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilience.data.loader import CachedLoader as CachedLoader
    from resilience.data.loader import cached as cached
    from resilience.data.sources import Source as Source
    from resilience.data.sources import Start as Start

_MODULES = {
    "CachedLoader": "resilience.data.loader",
    "Source": "resilience.data.sources",
    "Start": "resilience.data.sources",
    "cached": "resilience.data.loader",
}

__all__ = ["CachedLoader", "Source", "Start", "cached"]


def __getattr__(name: str) -> object:
    """Return what the package gives, imported on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
