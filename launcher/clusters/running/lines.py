"""Lines of several logs in the order of their times."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

from launcher.clusters.running.cluster import LogLine
from launcher.monitor.logs import LogReader

# What a line may begin with before its time: the node and rank, or a level.
_TIME = re.compile(
    r"(?:\[[^\]]*\] ?|[A-Z]+:? )?"
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?(?!\d)"
)


def parse_time(line: str) -> float | None:
    """Return the time that a line begins with, in unix seconds; None where it has none.

    A time without a zone is taken for one of this machine's.
    """
    found = _TIME.match(line)
    if found is None:
        return None
    day, clock, fraction, zone = found.groups()
    zone = "+00:00" if zone == "Z" else zone or ""
    if zone and ":" not in zone:
        zone = f"{zone[:3]}:{zone[3:]}"
    try:
        whole = datetime.fromisoformat(f"{day}T{clock}{zone}")
    except ValueError:
        return None
    return whole.timestamp() + float(f"0.{fraction or 0}")


def timed_lines(source: str, texts: Iterable[str], since: float) -> list[LogLine]:
    """Return lines with their times; one that has none has that of the line before, or `since`."""
    lines = []
    for text in texts:
        since = parse_time(text) or since
        lines.append(LogLine(time=since, source=source, text=text))
    return lines


def merge_lines(logs: Iterable[Sequence[LogLine]]) -> list[LogLine]:
    """Return the lines of several logs by time; those of one log keep their order."""
    return sorted((line for log in logs for line in log), key=lambda line: line.time)


class FolderTail:
    """The lines of the files that a function finds, those that come later among them."""

    def __init__(self, find: Callable[[], Iterable[Path]], began: Callable[[Path], float]) -> None:
        """`began` returns when the first line of a file came, as near as that is known."""
        self._find = find
        self._began = began
        self._logs: dict[Path, LogReader] = {}
        self._is_first = True
        self._found: list[list[LogLine]] = []
        """Lines that were read and not returned yet: another file could not be read."""

    def read_new(self) -> Sequence[LogLine]:
        """Return the lines that ended since the last call; a later one has them after an error."""
        for path in sorted(self._find()):
            is_new = path not in self._logs
            log = self._logs.setdefault(path, LogReader(path, from_start=True))
            since = self._began(path) if is_new and self._is_first else time.time()
            self._found.append(timed_lines(source_name(path), log.read_new(), since))
        found, self._found, self._is_first = self._found, [], False
        return merge_lines(found)


def source_name(path: Path) -> str:
    """Return by what a log is named beside its lines."""
    return f"{path.parent.name} {path.stem}" if path.parent.parent.name == "logs" else path.stem
