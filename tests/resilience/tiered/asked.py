"""The command that asks daemons, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.resilience.tiered.daemons import LIMIT_S, ROOT


def spawn(*words: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Start `python -m resilience.tiered` with these words, and variables beside the usual ones."""
    known = {name: text for name, text in os.environ.items() if not name.startswith("MEMORYD_")}
    return subprocess.Popen(
        [sys.executable, "-m", "resilience.tiered", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**known, "PYTHONPATH": str(ROOT), **variables},
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit status and both outputs."""
    try:
        output, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output, errors


def ask(*words: str | Path, **variables: str) -> tuple[int, str, str]:
    """Run it to its end."""
    return end(spawn(*words, **variables))
