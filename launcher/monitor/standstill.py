"""When a run stands still: no step for three times the usual time and more. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from launcher.monitor.duration import format_seconds

_TIMES_USUAL = 3
_STANDSTILL_S_MIN = 5.0
"""Shorter gaps do not count: clocks of machines differ, and a checkpoint may take so long."""


def usual_step_s(durations_s: Iterable[float]) -> float | None:
    """Return what a step usually takes: one that stood still does not change it."""
    found = [each for each in durations_s if each >= 0]
    return median(found) if found else None


def standstill_limit_s(step_s: float, num_steps: int) -> float:
    """Return how long the report of so many steps may take before the run stands still."""
    return max(_TIMES_USUAL * step_s * num_steps, _STANDSTILL_S_MIN)


def standstill_text(quiet_s: float | None) -> str | None:
    """Return a standstill in words, None where there is none."""
    return None if quiet_s is None else f"no step for {format_seconds(quiet_s)}"
