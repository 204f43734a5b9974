"""What a worker inherits from the agent of its node."""

from __future__ import annotations

import os

from resilience.inprocess.handles import WorkerHandles, read_handles
from resilience.state.shared import SharedState
from resilience.state.transfer_buffer import TransferBuffer


def read_own_handles() -> WorkerHandles:
    """Return what an agent gave this process."""
    handles = read_handles(os.environ)
    assert handles is not None, "main looks whether an agent has started this worker"
    return handles


def open_shared(handles: WorkerHandles) -> SharedState:
    """Open the memory that the node's workers have in common; a spare maps what is there now."""
    shared = SharedState(handles.state_files)
    shared.prepare()
    return shared


def open_transfer_buffer(handles: WorkerHandles) -> TransferBuffer:
    """Open the memory through which state moves between the node's workers."""
    transfer_buffer = TransferBuffer(
        handles.transfer_file, handles.num_local_ranks, handles.transfer_bytes
    )
    transfer_buffer.touch()
    return transfer_buffer
