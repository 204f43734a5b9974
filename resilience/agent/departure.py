"""A node that was asked to leave a run that continues. One thread, and signals in it."""

from __future__ import annotations

import time

from resilience.agent.options import AgentOptions

DEPARTED = "this node has left the run, which goes on without it"
LET_GO = "this node has left the run, which waits for another one in its place"
_LAST_S = 1.0
"""What the end of the workers takes of the time that a node has."""


class Departure:
    """What has been asked, and until when."""

    def __init__(self, options: AgentOptions) -> None:
        run = options.coordinator
        is_replaced = run.awaits_nodes or run.num_standby_nodes > 0
        self._may_leave = run.policy.is_elastic or (run.recovers and is_replaced)
        self._ends_run = options.ends_run
        self._within_s = options.grace_s
        self._asked_s = 0.0
        self._is_told = False
        self.signal: int | None = None
        """The signal that the node was asked with; None where it stays."""

    def ask(self, number: int) -> bool:
        """Note that the node is to leave; False where the run is to end.

        Once: Slurm signals a job that is preempted or over its limit twice.
        """
        return not (self._ends_run or self.ask_alone(number))

    def ask_alone(self, number: int) -> str:
        """Note that the node is to leave, and the run to go on; returns why it cannot."""
        if not self._may_leave:
            return "the run has one size; stop it, or let resilience.elastic say others"
        if self.signal is None:
            self.signal, self._asked_s = number, time.monotonic()
        return ""

    def is_new(self) -> bool:
        """Return, once, that the others have to be told."""
        is_told, self._is_told = self._is_told, True
        return not is_told

    def left_s(self, now_s: float) -> float | None:
        """Return how long the node has; None where it stays."""
        return None if self.signal is None else max(0.0, self._limit_s - now_s)

    def is_over(self, now_s: float) -> bool:
        """Return whether the node has to go, however the others go on."""
        return now_s >= self._limit_s

    @property
    def _limit_s(self) -> float:
        return self._asked_s + self._within_s - min(_LAST_S, self._within_s / 4)
