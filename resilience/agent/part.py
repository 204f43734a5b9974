"""A node's part in the newest generation: which ranks it has, what they hold, what failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from resilience.agent.coordination.standing import Said, Standing
from resilience.agent.processes.failures import Failures
from resilience.agent.processes.worker import Worker
from resilience.comm.messages import (
    PLANNED,
    Agree,
    Break,
    Failed,
    Finished,
    Join,
    Learn,
    Message,
    Open,
    Propose,
    Stopped,
)
from resilience.events import EventLog
from resilience.state.report import Phase, Report, fresh_report


class NodePart:
    """What the agent knows of the generation, and tells the coordinator of its ranks."""

    def __init__(
        self,
        node: str,
        start: str,
        *,
        tell: Callable[[Message], None],
        say: Callable[[str], None],
        events: EventLog,
    ) -> None:
        self._node, self._start = node, start
        self._tell, self._say, self._events = tell, say, events
        self.standing = Standing()
        self._reports: tuple[Report, ...] = ()
        """Reports of all ranks, from before the newest generation of this node's workers."""
        self.opening: Open | None = None
        """The newest in which this node's workers were; None until there was one."""
        self.is_broken, self.broken_s = False, 0.0
        self.opened_s = 0.0
        self.reports: dict[int, Stopped] = {}
        """By rank, what has been said of this generation's end."""
        self._told: dict[int, Stopped] = {}
        """And of the one before it."""
        self._left: Failed | None = None
        """What a rank has said that has left this generation as all were to."""
        self.failures = Failures()
        self.has_blocks = False
        """Whether the program has blocks, so that its workers hold state."""

    @property
    def generation(self) -> int:
        """Return the newest generation that the node knows of; -1 where there was none."""
        return self.standing.generation

    @property
    def place(self) -> int:
        """Return the node's place in it, -1 where it has none."""
        layout = self.standing.layout
        return -1 if layout is None else layout.place_of(self._node, self._start)

    @property
    def is_member(self) -> bool:
        """Return whether the node has ranks in it."""
        return self.place >= 0

    @property
    def holds_state(self) -> bool:
        """Return whether what the workers held at the end of their generation counts.

        It does where no generation has begun since, and the node still has its place.
        """
        opening, layout = self.opening, self.standing.layout
        if opening is None or layout is None or not self.is_member or self._is_behind():
            return False
        place = opening.layout.index_of(self._node)
        return place >= 0 and opening.layout.shards_of(place) == layout.shards_of(self.place)

    def _is_behind(self) -> bool:
        """Return whether a generation has begun without the workers."""
        return self.opening is None or self.opening.generation != self.standing.opened

    def join(self, address: str, *, sees_folder: bool) -> Join:
        """Return what a coordinator is told of the node."""
        return self.standing.join(
            node=self._node, address=address, start=self._start, sees_folder=sees_folder
        )

    def rank(self, local_rank: int) -> int:
        """Return the rank of one of the node's places."""
        layout = self.standing.layout
        if layout is None or not self.is_member:
            return (self.opening.rank if self.opening else 0) + local_rank
        return layout.ranks_of(self.place).start + local_rank

    def open(self, opening: Open) -> None:
        """Take part in a generation."""
        self._reports = opening.read_reports()
        self.failures.open(opening.generation, self._reports)
        self.standing = self.standing.open(opening)
        self.opening, self.is_broken, self.opened_s = opening, False, time.monotonic()
        self._told, self.reports, self._left = self.reports, {}, None

    def has_lost(self, rank: int) -> bool:
        """Return whether the generation counts on what a process held that is gone since."""
        assert self.opening is not None
        before = self.opening.before or self.opening.layout
        place = before.index_of(self._node)
        if place < 0:
            return False
        at = before.ranks_of(place)[rank % before.num_local_ranks]
        report, told = self._reports[at], self._told.get(at)
        fresh = Phase.FRESH.value
        # The phase may be another one than was told: that of a gate that others had passed.
        is_counted = report.phase is not Phase.FRESH
        return is_counted and (told is None or told.report["phase"] == fresh)

    def learn(self, news: Learn) -> None:
        """Take note of a generation in which the node's workers are not; what they hold counts.

        It does where the node has its place there, and that generation ended before it began.
        """
        if news.generation <= self.generation:
            return
        self.standing = self.standing.learn(news)
        if self.holds_state:
            reports = map(self.relabel, self.reports.values())
            self.reports = {each.rank: each for each in reports}
        elif self.is_member or self._is_behind():
            self.reports = {}
        # Else the place may be given back before any generation begins.

    def consider(self, proposal: Propose) -> Agree | None:
        """Agree to the members of the next generation, unless it is too late for them."""
        self.standing, agreement = self.standing.consider(proposal)
        return agreement

    def note_ready(self, *, has_block: bool) -> None:
        """Note whether the program has blocks, as a worker says."""
        self.has_blocks = self.has_blocks or has_block

    def relabel(self, said: Said) -> Said:
        """Return what a worker has said of its generation under the newest number, and its rank."""
        return self._renumber(self.standing.relabel(said))

    def _renumber(self, said: Said) -> Said:
        layout = self.standing.layout
        if layout is None or not self.is_member:
            return said
        rank = layout.ranks_of(self.place)[said.rank % layout.num_local_ranks]
        if isinstance(said, Stopped):
            report = {**said.report, "rank": rank, "replica": layout.seat(rank).replica}
            return replace(said, rank=rank, report=report)
        return replace(said, rank=rank)

    def own_break(self, reason: str) -> Break:
        """Return the order that ends the generation in which the workers are."""
        opening = self.opening
        # A newer one, of which the node has heard since, is not theirs to leave.
        number = self.standing.opened if opening is None else opening.generation
        return Break(generation=number, reason=reason)

    def end(self) -> None:
        """Note that the generation is over: its ranks stop and report."""
        if not self.is_broken:
            self.is_broken, self.broken_s = True, time.monotonic()

    def pass_on(self, failed: Failed) -> None:
        """Tell of a fault of which a worker has told."""
        self.failures.note(failed)
        if failed.reason == PLANNED:
            self._left = failed
        self._tell(self.relabel(failed))

    def tell_left(self) -> None:
        """Tell a new coordinator what an earlier one was told of how the generation was left."""
        if self._left is not None and self.is_member:
            self._tell(self.relabel(self._left))

    def report(self, stopped: Stopped) -> None:
        """Note what a rank holds, and pass it on where the node has a place."""
        self.reports[stopped.rank] = stopped
        if self.is_member:
            self._tell(stopped)

    def report_fresh(self, worker: Worker) -> None:
        """Report for a process that has taken a rank and holds nothing yet."""
        layout = self.standing.layout
        assert layout is not None
        rank = self.rank(worker.local_rank or 0)
        report = fresh_report(layout, rank, self.generation)
        self._events.write("worker_replaced", rank=rank, pid=worker.pid)
        self.report(
            Stopped(
                generation=self.generation,
                rank=rank,
                report=report.to_json(),
                has_block=self.has_blocks,
                is_replaced=True,
            )
        )

    def report_rest(self, workers: Mapping[int, Worker | None]) -> None:
        """Report for those, by local rank, that hold nothing that counts."""
        for local_rank, worker in workers.items():
            if worker is None:
                continue
            will_tell = worker.within is not None or self.rank(local_rank) in self.reports
            if not (self.holds_state and will_tell):
                self.report_fresh(worker)

    def fail(self, rank: int, reason: str, text: str, quiet_s: float = 0.0) -> None:
        """Tell of a fault that no worker could tell of."""
        failed = Failed(
            generation=self.generation, rank=rank, reason=reason, text=text, quiet_s=quiet_s
        )
        self.failures.note(failed)
        self._say(text)
        self._tell(failed)

    def finish(self, status: int, text: str = "", local_rank: int = 0) -> None:
        """Tell that a rank has finished; with a text, that the run had better end so."""
        generation, rank = self.generation, self.rank(local_rank)
        self._tell(Finished(generation=generation, rank=rank, status=status, text=text))

    def warn(self, text: str) -> None:
        """Tell whoever looks after the run, and write it down."""
        self._say(text)
        self._events.write("warning", text=text)
