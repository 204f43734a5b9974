"""What an agent is told on its command line, once it is read."""

from __future__ import annotations

from dataclasses import dataclass

from resilience.agent.coordination.membership import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is told on its command line."""

    node: str
    host: str
    """Address under which other agents reach this one."""
    num_spares: int
    hang_deadline_s: float
    term_deadline_s: float
    """How long workers may take to end after SIGTERM."""
    coordinator: Options
