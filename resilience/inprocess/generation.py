"""One generation as a worker sees it: who its members are, and whether it still goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from resilience.comm.agent_store import AgentStore
from resilience.comm.gate import Gate, GroupChannel
from resilience.comm.messages import Break, Open
from resilience.comm.page import Activity, Page
from resilience.comm.world import World
from resilience.errors import BrokenError
from resilience.inprocess.lasting import end_set_up


class Generation:
    """The members of one generation, their store and their process group.

    `group` takes tensors in host memory: on a CPU it is torch's default group, on a GPU a
    LeaderGroup. Everything that refers to a group is made again in the next generation.
    """

    def __init__(
        self,
        opening: Open,
        *,
        node: str,
        device_type: str,
        page: Page | None,
        slot: int,
        open_store: Callable[[int], AgentStore],
        is_asked: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._is_asked = is_asked
        self.number = opening.generation
        self.rank = opening.rank
        self.layout = opening.layout
        self.world_size = opening.layout.world_size
        self.local_rank = opening.local_rank
        self.node = node
        self.reports = opening.read_reports()
        self.before = opening.before
        """Whose ranks the reports are of, where the number of nodes has changed."""
        self.is_passing = opening.is_passing
        """All ranks leave the generation again as soon as they have one state."""
        self.is_last = opening.is_last
        """The run gives up: this generation is for saving the state, and for nothing else."""
        self.broken: Break | None = None
        """Why the generation was ended from outside, once it was."""
        self._device_type = device_type
        self._open_store = open_store
        self._page = page
        self._slot = slot
        self._world = World(device_type=device_type)

    def open(self, *, timeout: timedelta, collective_timeout: timedelta) -> None:
        """Meet the other members; raises GroupOpenError after `timeout`."""
        self.check()
        end_set_up()
        self.group: ProcessGroup = self._world.open(
            store=self._open_store(self.number),
            rank=self.rank,
            world_size=self.world_size,
            num_local_ranks=self.layout.num_local_ranks,
            timeout=timeout,
            collective_timeout=collective_timeout,
        )
        self.check()
        self.gate = Gate(GroupChannel(self.group), world_size=self.world_size)

    @property
    def store(self) -> Store:
        """Return the generation's own store."""
        return self._world.store

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Return what is held while the generation is broken."""
        return self._world.lock

    @property
    def keeps_state(self) -> bool:
        """Return whether the generation counts on what this process holds."""
        at = self.rank
        if self.before is not None:
            place = self.before.index_of(self.node)
            if place < 0:
                return False
            at = self.before.ranks_of(place)[self.local_rank]
        own = self.reports[at]
        return own.member_generation == own.generation

    def is_to_be_left(self) -> bool:
        """Return whether this rank was told to ask all others to leave after a step."""
        return self._is_asked(self.number)

    def is_current(self) -> bool:
        """Return whether the generation still goes on."""
        return self.broken is None and not self._world.is_broken

    def check(self) -> None:
        """Raise BrokenError where the generation is over; cheap."""
        if self.broken is not None:
            raise BrokenError(self.broken.reason)

    def mark(self, activity: Activity, step: int, micro_batch: int = 0) -> None:
        """Show where the training thread is, and stop it where the generation is over."""
        if self._page is not None:
            self._page.mark(self._slot, step, activity, micro_batch)
        if activity is not Activity.UPDATE:
            self.check()

    def take_break(self, order: Break) -> None:
        """End the generation from another thread: wake whoever waits in its collectives."""
        if order.generation != self.number:
            return
        self.broken = order
        self._world.break_now()

    def close(self) -> None:
        """End the generation in this process; after it no break reaches anything."""
        self._world.break_now()
