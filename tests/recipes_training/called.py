"""Calls a function: `python -m tests.recipes_training.called MODULE:FUNCTION WORD...`."""

from __future__ import annotations

import importlib
import signal
import sys
import warnings

if __name__ == "__main__":
    # A worker that hangs is one that failed.
    signal.alarm(100)
    if "megatron.core" not in sys.modules:  # which warns of its own ways
        warnings.simplefilter("error")
    module, _, function = sys.argv[1].partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(sys.argv[2:]))
