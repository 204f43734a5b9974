"""Names of the files of a run's event log, which `resilience.events` writes and reads."""

from __future__ import annotations

import os
from contextlib import suppress
from glob import escape
from pathlib import Path

EVENTS_NAME = "events.jsonl"
"""Of the log in a run's folder: the launcher's file, beside which each node has its own."""


def node_events(log: Path, node: str) -> Path:
    """Return the file to which a node appends its events of a log."""
    return log.with_name(f"{log.stem}-{node}{log.suffix}")


def event_files(log: Path) -> list[Path]:
    """Return the files of a log that are there; a run of an older version has one for all nodes."""
    of_nodes: list[Path] = []
    with suppress(OSError):  # the folder is being removed, or its name is too long for one
        of_nodes = sorted(log.parent.glob(f"{escape(log.stem)}-*{escape(log.suffix)}"))
    return [*([log] if os.path.lexists(log) else []), *of_nodes]
