"""A worker's way to its agent for the lines of the event log, which the agent writes.

So no worker waits for the run's folder, none has a thread that a hanging file server holds where
SIGKILL does not reach it, and one that is killed takes nothing along that it has written.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from resilience.event_files import node_events
from resilience.events import EventLog
from resilience.inprocess.handles import read_handles

_CLOSE_DEADLINE_S = 5.0
"""How long an agent that reads nothing can hold up the end of a worker."""


class EventPipe:
    """Takes the lines of one process; waits for its reader in `close` alone.

    What the pipe has no room for stays in memory until the next line.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._rest = bytearray()
        self._lock = threading.Lock()
        os.set_blocking(file, False)

    def append(self, line: bytes) -> None:
        """Take a whole line."""
        with self._lock:
            self._rest += line
            self._push()

    def close(self) -> None:
        """Write what is left, in a bounded time, and close the pipe; a second call does nothing."""
        deadline_s = time.monotonic() + _CLOSE_DEADLINE_S
        with self._lock:
            while self._rest and (left_s := deadline_s - time.monotonic()) > 0:
                select.select([], [self._file], [], left_s)
                self._push()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _push(self) -> None:
        while self._rest:
            try:
                num_written = os.write(self._file, self._rest)
            except BlockingIOError:
                return
            except BrokenPipeError:
                # The agent is gone, and this process ends with it.
                self._rest.clear()
                return
            del self._rest[:num_written]


def open_events(
    path: Path,
    *,
    node: str,
    rank: int | None,
    generation: int,
    complain: Callable[[str], None] | None = None,
) -> EventLog:
    """Open the node's file of a run's log in a worker: through its agent where that writes it.

    Raises OSError where there is no such agent and the file cannot be opened.
    """
    handles = read_handles(os.environ)
    sink = None
    # Of the names alone: to look at the files could take as long as to write them.
    if handles is not None and os.path.abspath(path) == handles.events_path:  # noqa: PTH100
        sink = EventPipe(os.dup(handles.events_file))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    own = node_events(path, node)
    return EventLog(own, node=node, rank=rank, generation=generation, complain=complain, sink=sink)
