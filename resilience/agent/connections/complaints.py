"""Addresses at which this agent finds no agent of its run. Pure."""

from __future__ import annotations

from resilience.agent.connections.transport import NO_AGENT
from resilience.arguments import NAMELESS_S, NO_NAME
from resilience.runtime.door import AGENTS

OTHER_RUN = "an agent of another run is there; give each run an --rdzv-endpoint of its own"


class Complaints:
    """Complaints about addresses where no agent of the run answers, or whose name stays unknown."""

    def __init__(self, lease_s: float) -> None:
        self._patience_s = {NO_NAME: NAMELESS_S, NO_AGENT: lease_s, OTHER_RUN: lease_s}
        """Seconds that a reason has to last, by its first words."""
        self.named: dict[str, str] = {}
        """Complaints so far, by address."""
        self._since: dict[str, tuple[str, float]] = {}
        """The last of these reasons and its first time, by address."""

    def judge(self, address: str | None, reason: str, now_s: float) -> str:
        """Return a complaint about the end of a connection, once an address; empty for none."""
        if address is None or address in self.named:
            return ""
        kind = next(filter(reason.startswith, self._patience_s), "")
        if self._since.get(address, ("",))[0] != kind:
            self._since[address] = kind, now_s
        is_late = kind and now_s - self._since[address][1] >= self._patience_s[kind]
        if not is_late and reason not in AGENTS.lasting:
            return ""
        self.named[address] = reason
        return f"{address}: {reason}"
