"""What an agent is told on its command line, once it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resilience.agent.coordination.membership import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is told on its command line."""

    node: str
    host: str
    """Address under which other agents reach this one."""
    num_local_ranks: int
    num_spares: int
    hang_deadline_s: float
    stop_deadline_s: float
    refill_delay_s: float = 1.0
    """How long after an opening the next spare is made: the run comes first."""
    term_deadline_s: float
    """How long workers may take to end after SIGTERM."""
    coordinator: Options
    announce: Callable[[str], None] = lambda address: None
    """Tells nodes that come late of another coordinator's address."""
