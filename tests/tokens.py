"""A run's token in a file, as a test's agents and daemons take it."""

from __future__ import annotations

from pathlib import Path

TOKEN = "known to the agents of one run"


def write_token(path: Path, text: str = TOKEN) -> Path:
    """Write a token that nobody else may read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path
