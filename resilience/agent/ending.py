"""How a node's part of the run ends: with which status, and when its processes have to be gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from resilience.agent.connections.transport import NO_AGENT
from resilience.agent.coordination.node import MembershipNode
from resilience.agent.coordination.opening import lacks_nodes
from resilience.agent.options import AgentOptions
from resilience.agent.part import NodePart
from resilience.agent.processes.crew import Crew
from resilience.agent.processes.output import Console
from resilience.agent.processes.worker import Worker
from resilience.arguments import NO_NAME
from resilience.comm.messages import GAVE_UP_STATUS, End

LEFT_STATUS = 128 + signal.SIGKILL
"""Exit status of an agent whose node leaves a run that may go on: that of one that was killed, so
that whoever has started it takes the node for lost."""
LAST_WORDS_S = 5.0
"""How long workers may take to end by themselves once the run has failed, or nobody needs them."""
GOOD_END_S = 60.0
"""How long they may take once it has ended well: what follows a block may still write."""
ASKED = "asked to end"


class Ending:
    """Ends the run or the node's part of it, and what is left at the end of a time limit."""

    def __init__(
        self,
        crew: Crew,
        part: NodePart,
        membership: MembershipNode,
        console: Console,
        *,
        options: AgentOptions,
        end_workers: Callable[[End], float],
    ) -> None:
        """`end_workers` has the workers end as the run does, and says how long they may take."""
        self._crew, self._pool, self._part, self._membership = crew, crew.pool, part, membership
        self._console, self._say = console, console.say
        coordinator = options.coordinator
        self._options, self._began_s = options, time.monotonic()
        self._is_alone = coordinator.num_nodes + coordinator.num_standby_nodes == 1
        self._is_surplus = False
        self._end_workers = end_workers
        self._kill_deadline_s = min(LAST_WORDS_S, coordinator.stop_deadline_s)
        self.end: End | None = None
        self._why = ASKED
        self.stop_status: int | None = None
        """Exit status once somebody has asked the agent to end."""
        self._lost_places: set[int] = set()
        """Local ranks whose processes have ended since then, and without the others."""
        self._limit_s = float("inf")

    def ask(self, status: int, deadline_s: float, why: str = ASKED) -> None:
        """Note that somebody has asked the agent to end, within the deadline."""
        self.stop_status, self._why = status, why
        if self.end is None:
            self._limit(deadline_s)

    def finish(self, end: End, what: str = "the run ends") -> None:
        """End as the run does, unless the end was known before."""
        if self.end is not None:
            return
        self._membership.close()
        self._crew.close()
        self.end = end
        self._limit(self._end_workers(end))
        if end.status:
            self._part.failures.show(self._console)
            self._say(f"{what} with exit status {end.status}: {end.reason}")

    def finish_as_asked(self, text: str = "") -> None:
        """End the run, or leave it where this node is no part of it."""
        is_orderly, text = not text, text or self._why
        status = self.stop_status or 128 + signal.SIGTERM
        for local_rank in self._lost_places or (0,):
            self._part.finish(status, text, local_rank)
        if self.end is None and not (self._part.is_member and is_orderly):
            self.finish(End(status=status, reason=text))

    def give_up(self, text: str, status: int = 1) -> None:
        """End a run that has not begun; else leave the place of this node to another one."""
        if self._part.opening is None:
            self._part.finish(status, text)
            self.finish(End(status=status, reason=text))
        else:
            self.leave(text, status)

    def leave(self, text: str, status: int = LEFT_STATUS) -> None:
        """Say goodbye: nobody is to wait for this node."""
        self._part.warn(text)
        if self._is_alone:
            self.finish(End(status=GAVE_UP_STATUS, reason=text))
            return
        self.finish(End(status=status, reason=text), "this node leaves the run")
        self._membership.leave(text)

    def void(self, text: str) -> None:
        """End this node's part at once, and save nothing of it: the run goes on elsewhere."""
        self._part.warn(text)
        self.finish(End(status=LEFT_STATUS, reason=text), "this node's part ends")
        self._kill_all()
        self._membership.leave(text)

    def check(self, now_s: float) -> None:
        """Do what is due about the end."""
        self._check_meeting(now_s)
        if now_s >= self._limit_s:
            if self.end is None:
                self.finish_as_asked("workers did not stop in the grace period")
            self._kill_all()
        elif self.end is None and self.stop_status and (self._lost_places or not self._has_work()):
            # Told until it is heard: the coordinator may be another one by now.
            self.finish_as_asked()

    def _has_work(self) -> bool:
        """Return whether workers may still take the step after which they end."""
        has_workers = self._part.opening is not None and any(self._crew.ranks.values())
        state = self._membership.state
        return has_workers and not (state is not None and lacks_nodes(state))

    def _check_meeting(self, now_s: float) -> None:
        """End where no other agent of the run was found in time, or a run of one node has two."""
        membership, options = self._membership, self._options
        if options.is_single and membership.has_coordinator and membership.state is None:
            reason = "another agent is at work in --run-dir; give each run a folder of its own"
            self.finish(End(status=2, reason=reason))
            return
        if membership.has_coordinator or self._part.generation >= 0:
            self._note_surplus()
            return
        found, limit_s = membership.complaints, options.coordinator.join_deadline_s
        # Other nodes' agents may stand still; a run of one node has none.
        passing = (NO_NAME,) if self._is_alone else (NO_NAME, NO_AGENT)
        if not any(found.get(each, NO_NAME).startswith(passing) for each in options.endpoints):
            limit_s = options.coordinator.lease_s
        if now_s >= self._began_s + limit_s:
            texts = [f"{address}: {what}" for address, what in found.items()]
            advice = "; ".join(texts) or "start an agent on that host, or look for a firewall"
            where = f"{','.join(options.endpoints)} within {now_s - self._began_s:.0f} s"
            self.finish(End(status=1, reason=f"no rendezvous at --rdzv-endpoint {where}; {advice}"))

    def _note_surplus(self) -> None:
        """Say once that a run without standby nodes has no place for this node."""
        layout = self._part.standing.layout
        if self._is_surplus or layout is None or self._options.node in layout.nodes:
            return
        if not self._membership.sees(layout.nodes) or self._options.coordinator.num_standby_nodes:
            return
        self._is_surplus = True
        self._say(
            f"the run has all its nodes ({len(layout.nodes)}); this one waits to take the place of "
            "a lost node"
        )

    def _limit(self, deadline_s: float) -> None:
        self._limit_s = min(self._limit_s, time.monotonic() + deadline_s)

    def is_over(self) -> bool:
        """Return whether nothing is left to wait for.

        A process that not even SIGKILL ends is in the kernel's hands, or a driver's.
        """
        return self.end is not None and all(
            worker.is_ended or worker.outlives_kill(self._kill_deadline_s)
            for worker in self._pool.workers.values()
        )

    def _kill_all(self) -> None:
        for worker in self._pool.workers.values():
            if self.is_needed(worker):
                self._say(f"rank {worker.rank} did not end within {GOOD_END_S:g} s of the run")
            worker.signal(signal.SIGKILL)
        self._limit_s = float("inf")

    def note_asked(self, worker: Worker) -> None:
        """Note that a process has ended after the agent was asked to end: nobody replaces it.

        The others of a program without a block may end in their own time.
        """
        if not self._crew.owns(worker):
            return
        local_rank = worker.local_rank or 0
        self._crew.ranks[local_rank] = None
        if self._part.is_member and worker.is_attached and not worker.is_finished:
            # The others cannot end after a common step. They stop, and save what they hold.
            rank = self._part.rank(local_rank)
            self._part.fail(rank, "died", f"rank {rank} {worker.describe_end()} before the others")
            self._lost_places.add(local_rank)
        others = [each for each in self._crew.ranks.values() if each is not None]
        if others and not any(each.is_attached for each in others) and not worker.is_attached:
            return
        self.finish_as_asked()

    def is_needed(self, worker: Worker) -> bool:
        """Return whether the run has ended well, and the worker was a rank of it to the end."""
        has_ended_well = self.end is not None and self.end.status == 0
        return has_ended_well and self._part.is_member and worker.is_finished

    def note_late(self, worker: Worker) -> None:
        """Note that a rank failed after the run had ended well.

        That is a failure of the run where its program may have had more to do.
        """
        if not (self.is_needed(worker) and worker.status):
            return
        text = f"rank {worker.rank} {worker.describe_end()} after its last step"
        if worker.is_done:
            self._say(f"{text}; the run had finished before")
            return
        self._say(text)
        self.end = End(status=max(1, worker.status), reason=text)
