"""Whether a signal that asks a worker to end is its agent's.

Slurm signals all processes of a node that is to leave a run. Of these the agent alone knows what
that means: this node leaves, or all ranks stop. It notes its word to a worker, and then signals it.
"""

from __future__ import annotations

import os

from resilience.comm.page import Page
from resilience.inprocess.handles import read_handles


def is_asked_to_end() -> bool:
    """Return whether this process is to obey a SIGTERM, for its handler.

    It is not where an agent that recovers has started the process and did not send the signal.
    """
    handles = read_handles(os.environ)
    if handles is None or not handles.recovers:
        return True
    page = Page(handles.page_file, handles.num_slots)
    try:
        return page.is_asked_to_end(handles.slot)
    finally:
        page.close()
