"""The small files of a folder of caches: whose it is, how long it stays, what a cache holds."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

MARKER_NAME = "batch-cache.json"
"""The file that makes a folder ours; says whose it is and how long it stays."""

_VERSION = 1
_KEEP_UNKNOWN_S = 24 * 3600.0
"""How long a folder stays whose marker was cut short when its maker was killed."""
_MARKER_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """Whose a root is. The job is empty where the file was cut short."""

    job: str
    keep_s: float


def marker_text(marker: Marker) -> str:
    """Return what `read_marker` reads."""
    content = {"version": _VERSION, "job": marker.job, "keep_s": marker.keep_s}
    return json.dumps(content, sort_keys=True) + "\n"


def is_root(folder: Path) -> bool:
    """Return whether a folder is one of ours that this user may read."""
    try:
        return read_marker(folder) is not None
    except PermissionError:
        return False


def read_other(root: Path, job: str) -> Marker | None:
    """Return the marker of a root that is another job's."""
    marker = read_marker(root)
    return marker if marker is not None and marker.job not in ("", job) else None


def read_marker(root: Path) -> Marker | None:
    """Return whose a root is; None where there is no marker, or another's file of this name."""
    try:
        file = os.open(root / MARKER_NAME, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        text = os.read(file, _MARKER_BYTES_MAX)
    finally:
        os.close(file)
    if not text:
        return Marker(job="", keep_s=_KEEP_UNKNOWN_S)
    try:
        content = json.loads(text)
        return Marker(job=str(content["job"]), keep_s=float(content["keep_s"]))
    except (ValueError, KeyError, TypeError):
        return None


def write_text(path: Path, text: str) -> None:
    """Write a small file unless it has this text already.

    The file is written in place: several processes write the same text, and a reader recognises a
    file that was cut short.
    """
    content = text.encode()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if os.pread(file, len(content) + 1, 0) == content:
            return
        if os.pwrite(file, content, 0) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, len(content))
    finally:
        os.close(file)
