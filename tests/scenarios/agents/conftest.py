from __future__ import annotations

from tests.resilience.agent.conftest import place, run, undisturbed

__all__ = ["place", "run", "undisturbed"]
