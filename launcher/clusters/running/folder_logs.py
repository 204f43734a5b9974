"""The logs that lie in a run's folder: a file for each node, and for each rank and generation."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from launcher.clusters.running.lines import FolderTail
from launcher.rundir import EVENTS_FILE
from resilience.events import Event, EventReader

_RANK_LOG = re.compile(r"rank-(\d+)\.generation-(\d+)")


def open_folder_logs(
    run_dir: Path, patterns: Sequence[str], rank: int | None, but: Collection[str] = ()
) -> FolderTail:
    """Return the lines of the logs of these patterns below the run's folder, or of one rank.

    A node's log has the lines of its ranks, too. `but` are names that are none of a node.
    """
    began = _read_beginnings(run_dir / EVENTS_FILE)
    first = min(began.values(), default=0.0)

    def find() -> Iterator[Path]:
        ranks = f"logs/*/rank-{rank}.generation-*.log"
        for pattern in patterns if rank is None else (ranks,):
            yield from (path for path in run_dir.glob(pattern) if path.name not in but)

    def begin(path: Path) -> float:
        name = _RANK_LOG.fullmatch(path.stem)
        return began.get((int(name[1]), int(name[2])), first) if name else first

    return FolderTail(find, begin)


def _read_beginnings(events: Path) -> dict[tuple[int | None, int], float]:
    """Return the time of the first event of each rank and generation."""
    found: dict[tuple[int | None, int], float] = {}
    for event in read_all(events):
        found.setdefault((event.rank, event.generation), event.time)
    return found


def read_all(events: Path) -> list[Event]:
    """Return the events of a run so far; lines that are none are left out."""
    return EventReader(events).read_new()


def newest_generation(events: Path) -> int:
    """Return the newest generation of which a run has events; the launcher's belong to that one."""
    return max((event.generation for event in read_all(events)), default=0)
