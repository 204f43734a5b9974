"""What names a step to torch.distributed.checkpoint: NAMESPACE/STEP, or STEP alone. Pure."""

from __future__ import annotations

import os


def parse_checkpoint_id(checkpoint_id: str | os.PathLike[str], namespace: str) -> int:
    """Return the step that is named; ValueError for none, and for one of another namespace."""
    found = split_checkpoint_id(checkpoint_id)
    if found is None or found[0] not in ("", namespace):
        raise ValueError(
            f"checkpoint_id is {os.fspath(checkpoint_id)!r}, no step of the namespace "
            f"{namespace!r}; allowed: STEP and {namespace}/STEP"
        )
    return found[1]


def split_checkpoint_id(checkpoint_id: str | os.PathLike[str]) -> tuple[str, int] | None:
    """Return namespace and step, the first empty where none is named; None where no step is."""
    namespace, _, step = str(os.fspath(checkpoint_id)).rpartition("/")
    return (namespace, int(step)) if step.isascii() and step.isdecimal() else None


def name_checkpoint(namespace: str, step: int | None) -> str | None:
    """Return what names a step; None for none."""
    return None if step is None else f"{namespace}/{step}"
