"""The faults that the recipe of a protected program brings upon its run."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from resilience.events import EventLog
from resilience.faults.injector import Injector
from resilience.inprocess.event_pipe import open_events
from resilience.inprocess.generation import Generation
from resilience.inprocess.handles import WorkerHandles
from resilience.run_record import FAULTS_VARIABLE, RUN_DIR_VARIABLE
from resilience.settings import FAULT_LIST


def open_injector(handles: WorkerHandles, members: Generation) -> Injector | None:
    """Return what fires this rank's faults in a generation; None in a run that has none."""
    faults, run_dir = os.environ.get(FAULTS_VARIABLE), os.environ.get(RUN_DIR_VARIABLE)
    if not faults or not run_dir:
        return None
    events = _open_log(Path(handles.events_path), handles.node)
    events.enter(members.number, rank=members.rank)
    return Injector(
        FAULT_LIST.validate_json(faults),
        rank=members.rank,
        layout=members.layout,
        run_dir=Path(run_dir),
        events=events,
        agent_pid=handles.agent_pid,
    )


@cache
def _open_log(path: Path, node: str) -> EventLog:
    """Return the log of this process, whose pipe lasts over all generations."""
    return open_events(path, node=node, rank=None, generation=0)
