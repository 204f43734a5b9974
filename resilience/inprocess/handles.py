"""What a worker inherits from its agent; no other module reads these variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

AGENT_FD = "RESILIENCE_AGENT_FILE"
EVENTS_FD = "RESILIENCE_EVENTS_FILE"
SLOT = "RESILIENCE_SLOT"
AGENT_PID = "RESILIENCE_AGENT_PID"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHandles:
    """Descriptors and numbers that a worker inherits from its agent."""

    agent_file: int
    events_file: int
    """Takes lines for the log at `events_path`, which the agent writes."""
    events_path: str
    page_file: int
    transfer_file: int
    """Shared memory for transfers, a part for each local rank; -1 where there is none."""
    state_files: tuple[int, ...]
    """Shared memory for the states themselves, a file for each local rank."""
    slot: int
    num_slots: int
    num_local_ranks: int
    transfer_bytes: int
    node: str
    agent_pid: int
    recovers: bool = True
    """Whether the run goes on in this process after a fault; else all workers begin afresh."""

    def variables(self) -> dict[str, str]:
        """Return the environment variables that say so."""
        return {_name(field): json.dumps(value) for field, value in asdict(self).items()}


def read_handles(variables: Mapping[str, str]) -> WorkerHandles | None:
    """Return what the worker inherits, or None for a process that no agent has started."""
    if AGENT_FD not in variables:
        return None
    found: dict[str, Any] = {
        each.name: json.loads(variables[_name(each.name)]) for each in fields(WorkerHandles)
    }
    return WorkerHandles(**found | {"state_files": tuple(found["state_files"])})


def _name(field: str) -> str:
    return f"RESILIENCE_{field.upper()}"
