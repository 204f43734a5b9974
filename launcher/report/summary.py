"""The few lines that a run ends with on the console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from launcher.monitor.duration import format_seconds
from launcher.monitor.recoveries import Recovery
from launcher.monitor.runstate import RunState


def summary_text(state: RunState, report: Path | None) -> str:
    """Return what a run came to: result, steps, loss, time, and where its files are."""
    rows = {
        "steps": f"{state.num_steps} of {state.max_steps}",
        "loss": loss_text(state.first_loss, state.loss),
        "faults": _faults(state),
        "tiers": state.tiers.text,
        "wall time": _wall_time(state),
        "checkpoint": state.checkpoint,
        "report": None if report is None else str(report),
    }
    lines = [f"{state.recipe} version {state.version}: {result_text(state)}"]
    lines += [f"  {name:<10}  {value}" for name, value in rows.items() if value]
    return "\n".join(lines)


def result_text(state: RunState) -> str:
    """Return how a run ended in a few words."""
    if state.exit_status is None:
        return "no end on record"
    if state.exit_status == 0:
        return "finished"
    return f"failed with exit status {state.exit_status}: {state.reason}"


def loss_text(first: float | None, last: float | None) -> str | None:
    """Return a run's first and last loss and the fall between, None without a loss."""
    if first is None or last is None:
        return None
    fall = fall_percent(first, last)
    change = "" if fall is None else f" ({'fell' if fall >= 0 else 'rose'} by {abs(fall):.1f} %)"
    return f"{first:.4f} -> {last:.4f}{change}"


def fall_percent(first: float, last: float) -> float | None:
    """Return by how much of itself the loss fell; None where that is no number."""
    if not (math.isfinite(first) and math.isfinite(last)) or first == 0:
        return None
    return 100 * (first - last) / abs(first)


def faults_text(recoveries: Sequence[Recovery], lost_s: float, wall_s: float | None) -> str | None:
    """Return how many faults a run met and what they cost it, None where it met none."""
    if not recoveries:
        return None
    num_injected = sum(recovery.is_injected for recovery in recoveries)
    injected = f" ({num_injected} injected)" if num_injected else ""
    share = f", {100 * lost_s / wall_s:.1f} % of the run" if wall_s else ""
    num_steps = sum(recovery.steps_lost for recovery in recoveries)
    steps = f", {num_steps} steps lost" if num_steps else ", no step lost"
    return f"{len(recoveries)}{injected}, {format_seconds(lost_s)} lost{share}{steps}"


def _faults(state: RunState) -> str | None:
    known = state.started_at is not None and state.finished_at is not None
    wall_s = (state.finished_at or 0.0) - (state.started_at or 0.0) if known else None
    return faults_text(state.recoveries, state.seconds_lost, wall_s)


def _wall_time(state: RunState) -> str | None:
    if state.started_at is None or state.finished_at is None:
        return None
    return format_seconds(state.finished_at - state.started_at)
