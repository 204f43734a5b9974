"""Addresses at which this agent finds no agent of its run. Pure."""

from __future__ import annotations

from resilience.arguments import NAMELESS_S, NO_NAME
from resilience.runtime.door import AGENTS

OTHER_RUN = "an agent of another run is there; give each run an --rdzv-endpoint of its own"


class Complaints:
    """Complaints about addresses whose door refuses this agent, or whose name stays unknown."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}
        """Complaints so far, by address."""
        self._nameless: dict[str, float] = {}
        """Since when the name in an address has not resolved."""

    def judge(self, address: str | None, reason: str, now_s: float) -> str:
        """Return a complaint about the end of a connection, once an address; empty for none."""
        if address is None or address in self.named:
            return ""
        if reason.startswith(NO_NAME):
            is_apart = now_s - self._nameless.setdefault(address, now_s) >= NAMELESS_S
        else:
            self._nameless.pop(address, None)
            is_apart = reason in (*AGENTS.lasting, OTHER_RUN)
        if not is_apart:
            return ""
        self.named[address] = reason
        return f"{address}: {reason}"
