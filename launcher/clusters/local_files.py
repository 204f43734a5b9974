"""Where the files of a local run lie in its folder."""

from __future__ import annotations

from pathlib import Path


def node_name(index: int) -> str:
    """Return the name of a node: that of its script, its log and its events."""
    return f"node-{index}"


def script_name(node: str) -> str:
    """Return the name of a node's script."""
    return f"{node}.sh"


def log_path(run_dir: Path, node: str) -> Path:
    """Return the file that takes what a node's processes print."""
    return run_dir / "logs" / f"{node}.log"
