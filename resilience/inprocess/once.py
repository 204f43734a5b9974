"""The one generation of a worker whose agent does not recover.

    coordinator = open_coordinator(handles)
    generation = await_generation(coordinator)

The worker is part of this generation and of no other: at a fault all workers
end, and others take part in the next one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from resilience.comm.messages import End, Open, Ready
from resilience.comm.page import Page
from resilience.inprocess.generation import store_prefix
from resilience.inprocess.handles import WorkerHandles
from resilience.inprocess.link import AgentLink, Coordinator
from resilience.inprocess.plain import take_opening
from resilience.inprocess.variables import rank_variables
from resilience.state.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class OneGeneration:
    """Who takes part, and where they meet."""

    number: int
    """How often the workers were started before."""
    rank: int
    local_rank: int
    layout: Layout
    store_address: str
    """HOST:PORT of the generation's TCPStore, which the agents keep."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.layout.world_size

    @property
    def store_prefix(self) -> str:
        """Return what the generation's keys begin with."""
        return store_prefix(self.number)


def open_coordinator(handles: WorkerHandles) -> Coordinator:
    """Return the way to the agent; the process ends when the agent does."""
    page = Page(handles.page_file, handles.num_slots)
    return AgentLink(handles.agent_file, page, handles.slot)


def await_generation(coordinator: Coordinator) -> OneGeneration:
    """Return the generation that this process takes part in, once it opens.

    From then on the environment says so as well. Ends the process where the run ends before.
    """
    opening = take_opening()
    if opening is None:
        # Where it was there before, the agent knows that the process is warm.
        coordinator.send(Ready(pid=os.getpid()))
        opening = _wait_open(coordinator)
        os.environ.update(rank_variables(opening))
    return OneGeneration(
        number=opening.generation,
        rank=opening.rank,
        local_rank=opening.local_rank,
        layout=opening.layout,
        store_address=opening.store,
    )


def _wait_open(coordinator: Coordinator) -> Open:
    while True:
        message = coordinator.wait()
        if isinstance(message, Open):
            return message
        if isinstance(message, End):
            os._exit(max(1, message.status))
