"""What a run keeps in a node's memory under names of its own: checkpoints and batches."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from launcher.clusters.running.cluster import Cleaned, RunFolder
from resilience.data.errors import CacheFolderError
from resilience.data.folder import remove_root
from resilience.tiered.arena_folder import SHARED_MEMORY, find_arenas, remove_arena


def batch_folder(run: RunFolder) -> Path | None:
    """Return the folder of the run's batches on each node, None where it has none."""
    settings = run.job.resilience.batches
    if settings is None:
        return None
    digest = hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=6).hexdigest()
    return Path(settings.folder or SHARED_MEMORY) / f"{run.job.name}-{digest}"


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether an arena of the run describes a shard: a new or foreign one has none."""
    return any(any(arena.glob("segment-*.meta")) for arena in find_arenas(run_dir))


def remove_arenas(run_dir: Path) -> None:
    """Remove the arenas of nodes that did not see the run succeed; what cannot go stays."""
    for path in find_arenas(run_dir):
        with suppress(OSError):
            remove_arena(path)


def find_memory(run: RunFolder) -> list[Path]:
    """Return what is there of the run in the memory of this machine."""
    found = find_arenas(run.path)
    batches = batch_folder(run)
    return [*found, batches] if batches and batches.exists() else found


def remove_memory(run: RunFolder) -> Cleaned:
    """Remove what the run has in the memory of this machine, but for what a process still uses."""
    removed, left = [], []
    batches = batch_folder(run)
    for path in find_memory(run):
        try:
            is_gone = remove_root(path, path.name) if path == batches else remove_arena(path)
        except (OSError, CacheFolderError) as error:
            left.append(f"{path}: {error}")
            continue
        if is_gone:
            removed.append(str(path))
        else:
            left.append(f"{path}, which is in use or not of this run")
    return Cleaned(removed=tuple(removed), left=tuple(left))
