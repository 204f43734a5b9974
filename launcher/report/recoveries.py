"""The report's table of recoveries: what ended a generation, and what the way back took. Pure."""

from __future__ import annotations

from launcher.monitor.duration import format_seconds
from launcher.monitor.recoveries import Recovery

TITLES = (
    "#",
    "generation",
    "at",
    "what",
    "detected",
    "torn down",
    "rebuilt",
    "repaired",
    "first step",
    "steps lost",
    "who",
)
_NOT_REACHED = "-"


def recovery_cells(recovery: Recovery, start: float) -> tuple[str, ...]:
    """Return what stands in a recovery's row; `start` is that of the run, in unix seconds."""
    return (
        str(recovery.number),
        str(recovery.generation),
        format_seconds(recovery.fault_at - start),
        _what(recovery),
        _seconds(recovery.detected_s),
        _seconds(recovery.stopped_s),
        _seconds(recovery.rebuilt_s),
        _seconds(recovery.recovered_s),
        _seconds(recovery.resumed_s),
        str(recovery.steps_lost),
        _who(recovery),
    )


def _what(recovery: Recovery) -> str:
    """Return the fault without the word injected, which has a label of its own."""
    step = "" if recovery.step is None else f", step {recovery.step}"
    text = f": {recovery.text}" if recovery.text and not recovery.is_injected else ""
    return f"{recovery.fault}{step}{text}"


def _who(recovery: Recovery) -> str:
    moved = f" ({recovery.num_bytes / 1e6:,.1f} MB)" if recovery.num_bytes else ""
    parts = [
        f"{recovery.roles}{moved}" if recovery.roles else "",
        recovery.changes,
        recovery.fallback or "",
        f"gave up: {recovery.surrender}" if recovery.surrender else "",
    ]
    return "; ".join(part for part in parts if part) or _NOT_REACHED


def _seconds(seconds: float | None) -> str:
    return _NOT_REACHED if seconds is None else f"{seconds:.2f} s"
