"""The few lines that a run ends with on the console."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from launcher.monitor.checkpoints import checkpoints_text, newest_saved
from launcher.monitor.duration import format_seconds
from launcher.monitor.recoveries import Recovery
from launcher.monitor.runstate import RunState
from launcher.monitor.storage import storage_text
from launcher.report.account import Account, account_text


def summary_text(state: RunState, report: Path | None, account: Account | None = None) -> str:
    """Return what a run came to: result, steps, loss, time, and where its files are."""
    rows = {
        "steps": ", ".join(filter(None, (state.steps_text, state.unmatched_text))),
        "loss": loss_text(state.first_loss, state.loss),
        "faults": faults_text(state, state.recoveries, state.seconds_lost, state.wall_s),
        "tiers": checkpoints_text(state.tiers),
        "wall time": _wall_text(state.wall_s, account),
        "went to": account_text(account) if account else None,
        "checkpoint": state.checkpoint,
        "report": None if report is None else str(report),
        "lost": "; ".join(state.losses),
        "store": store_text(state, state.finished_at),
    }
    lines = [f"{state.recipe} version {state.version}: {result_text(state)}"]
    lines += [f"  {name:<10}  {value}" for name, value in rows.items() if value]
    return "\n".join(lines)


def _wall_text(wall_s: float | None, account: Account | None) -> str | None:
    """Return how long the last start took, and all of them where the account is of more."""
    if wall_s is None:
        return None
    earlier_s = 0.0 if account is None else account.wall_s - wall_s
    more = f", {format_seconds(wall_s + earlier_s)} with the starts before" if earlier_s > 1 else ""
    return format_seconds(wall_s) + more


def store_text(state: RunState, now: float | None, before: str = "ago") -> str | None:
    """Return how far the store was at the end of a run; None where nothing was told of it.

    It is to have the last step of a run that has ended, also where that was saved nowhere.
    """
    newest = newest_saved(state.tiers)
    steps = [newest.step] if newest else []
    steps += [state.num_steps] if state.finished_at is not None and state.num_steps else []
    at = state.storage.stored_at if now is None else now
    return storage_text(state.storage, max(steps, default=None), at, before)


def result_text(state: RunState) -> str:
    """Return how a run ended in a few words."""
    if state.exit_status is None:
        return "no end on record"
    if state.exit_status == 0:
        return "finished"
    # Of a signal it was asked to end by, from whoever: `status` knows who cancelled it.
    word = "ended" if (state.reason or "").startswith("stopped by ") else "failed"
    return f"{word} with exit status {state.exit_status}: {state.reason}"


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


def faults_text(
    state: RunState, recoveries: Sequence[Recovery], lost_s: float, wall_s: float | None
) -> str | None:
    """Return how many faults a run met and what they cost it, None where it met none.

    What a run that failed has lost depends on who starts it again, and from where.
    """
    left = state.faults_left if state.exit_status is not None else 0
    unfired = f"{left} of the recipe did not fire, as no loop of resilience.protect met them"
    if not recoveries:
        return unfired if left > 0 else None
    num_injected = sum(recovery.is_injected for recovery in recoveries)
    injected = f" ({num_injected} injected)" if num_injected else ""
    parts = [f"{len(recoveries)}{injected}", f"{format_seconds(lost_s)} lost"]
    if wall_s:
        parts.append(f"{100 * lost_s / wall_s:.1f} % of the run")
    if num_steps := sum(recovery.steps_lost for recovery in recoveries):
        parts.append(f"{num_steps} steps lost")
    elif not state.exit_status:
        parts.append("no step lost")
    if state.exit_status and not recoveries[-1].is_done:
        parts.append("the last was not recovered from")
    parts += [unfired] if left > 0 else []
    return ", ".join(parts)
