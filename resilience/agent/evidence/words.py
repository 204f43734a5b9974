"""The files by which agents know each other in a run's folder, one of each agent that lives."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from resilience.plain_files import read_plain

AGENTS_FOLDER = "agents"


def find_words(path: Path) -> list[dict[str, str]]:
    """Return what agents have left in a run's folder, the newest first: `node`, `path` and more.

    An agent that was killed has not taken its word back. Waits for the disk.
    """
    found: list[tuple[float, dict[str, str]]] = []
    with suppress(OSError):
        for each in (path / AGENTS_FOLDER).iterdir():
            word = read_word(each)
            if word.keys() >= {"node", "address"}:
                found.append((each.stat().st_mtime, {**word, "path": str(each)}))
    return [word for _, word in sorted(found, key=lambda each: each[0], reverse=True)]


def read_word(path: Path) -> dict[str, str]:
    """Return what an agent has left in a file; nothing where that is no such file."""
    with suppress(OSError, ValueError, RecursionError):
        word = json.loads(read_plain(path))
        if isinstance(word, dict):
            return {str(key): str(value) for key, value in word.items()}
    return {}
