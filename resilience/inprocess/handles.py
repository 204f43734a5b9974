"""What a worker inherits from its agent; no other module reads these variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from resilience.comm.page import PAGE_NAME

AGENT_FD = "RESILIENCE_AGENT_FILE"
EVENTS_FD = "RESILIENCE_EVENTS_FILE"
SLOT = "RESILIENCE_SLOT"
AGENT_PID = "RESILIENCE_AGENT_PID"
EVENTS_READER = "RESILIENCE_EVENTS_READER"
"""The agent's own descriptor of the pipe for events, which can be opened to write to it."""


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


def reach_agent(handles: WorkerHandles, variables: Mapping[str, str]) -> WorkerHandles | None:
    """Return handles with a page and a pipe for events of this process's own; None without any.

    A worker has inherited both. A process that a worker starts, as launchers do, has none of its
    descriptors, or others under their numbers: it opens those of the agent.
    """
    events = {"self": str(handles.events_file), handles.agent_pid: variables.get(EVENTS_READER)}
    for process, events_file in events.items():
        page = f"/proc/{process}/fd/{handles.page_file}"
        with suppress(OSError):
            if PAGE_NAME in os.readlink(page):  # noqa: PTH115
                return replace(
                    handles,
                    page_file=os.open(page, os.O_RDWR),
                    events_file=os.open(f"/proc/{process}/fd/{events_file}", os.O_WRONLY),
                )
    return None


def _name(field: str) -> str:
    return f"RESILIENCE_{field.upper()}"
