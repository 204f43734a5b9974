"""What a worker inherits from its agent; no other module reads these variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AGENT_FD = "RESILIENCE_AGENT_FD"
EVENTS_FD = "RESILIENCE_EVENTS_FD"
EVENTS_PATH = "RESILIENCE_EVENTS_PATH"
PAGE_FD = "RESILIENCE_PAGE_FD"
TRANSFER_FD = "RESILIENCE_TRANSFER_FD"
STATE_FDS = "RESILIENCE_STATE_FDS"
SLOT = "RESILIENCE_SLOT"
NUM_SLOTS = "RESILIENCE_NUM_SLOTS"
NUM_LOCAL_RANKS = "RESILIENCE_NUM_LOCAL_RANKS"
TRANSFER_BYTES = "RESILIENCE_TRANSFER_BYTES"
NODE = "RESILIENCE_NODE"
AGENT_PID = "RESILIENCE_AGENT_PID"
RECOVERS = "RESILIENCE_RECOVERS"


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
        return {
            AGENT_FD: str(self.agent_file),
            EVENTS_FD: str(self.events_file),
            EVENTS_PATH: self.events_path,
            PAGE_FD: str(self.page_file),
            TRANSFER_FD: str(self.transfer_file),
            STATE_FDS: ",".join(map(str, self.state_files)),
            SLOT: str(self.slot),
            NUM_SLOTS: str(self.num_slots),
            NUM_LOCAL_RANKS: str(self.num_local_ranks),
            TRANSFER_BYTES: str(self.transfer_bytes),
            NODE: self.node,
            AGENT_PID: str(self.agent_pid),
            RECOVERS: str(int(self.recovers)),
        }


def read_handles(variables: Mapping[str, str]) -> WorkerHandles | None:
    """Return what the worker inherits, or None for a process that no agent has started."""
    if AGENT_FD not in variables:
        return None
    return WorkerHandles(
        agent_file=int(variables[AGENT_FD]),
        events_file=int(variables[EVENTS_FD]),
        events_path=variables[EVENTS_PATH],
        page_file=int(variables[PAGE_FD]),
        transfer_file=int(variables[TRANSFER_FD]),
        state_files=tuple(int(file) for file in variables[STATE_FDS].split(",") if file),
        slot=int(variables[SLOT]),
        num_slots=int(variables[NUM_SLOTS]),
        num_local_ranks=int(variables[NUM_LOCAL_RANKS]),
        transfer_bytes=int(variables[TRANSFER_BYTES]),
        node=variables[NODE],
        agent_pid=int(variables[AGENT_PID]),
        recovers=variables[RECOVERS] == "1",
    )
