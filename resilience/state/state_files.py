"""Makes the memory that `resilience.state.shared` maps; an agent does it without torch."""

from __future__ import annotations

import os


def create_state_files(num: int) -> list[int]:
    """Return descriptors of `num` empty places; closed on exec, owned by the caller."""
    files: list[int] = []
    try:
        files.extend(os.memfd_create(f"resilience-state-{number}") for number in range(num))
    except OSError:
        for file in files:
            os.close(file)
        raise
    return files
