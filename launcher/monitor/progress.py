"""How a run's state looks while it goes on: a live display, or plain lines.

Rendering is pure; the two displays only decide when to draw. Where the console
is no terminal, lines come when the run enters another phase, and for steps
about every ten seconds or ten percent, whichever is rarer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher.monitor.checkpoints import missed_text, newest_saved
from launcher.monitor.duration import format_seconds
from launcher.monitor.logs import plain
from launcher.monitor.phases import TRAINING
from launcher.monitor.recoveries import Recovery
from launcher.monitor.runstate import RunState
from launcher.monitor.standstill import standstill_text
from launcher.monitor.storage import storage_text

LINE_PERIOD_S = 10.0
LINE_SHARE = 0.1
_NUM_NODES_SHOWN = 8


def open_display(console: Console) -> LiveDisplay | LineDisplay:
    """Return the display that fits the console; neither is for several threads."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


class LiveDisplay:
    """A block of lines at the foot of a terminal, drawn anew in place."""

    refresh_s = 0.25
    """How long what is shown may stay the same."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def show(self, state: RunState, now: float) -> None:
        """Draw the state as it is at `now`, in unix seconds."""
        self._live.start()
        self._live.update(render_state(state, now), refresh=True)

    def close(self) -> None:
        """Leave the last drawing, and the console as it was; may be called twice."""
        self._live.stop()


@dataclass(frozen=True, slots=True)
class Shown:
    """What the last line said, and when."""

    phase: str
    num_steps: int
    time: float
    num_recoveries: int = 0
    standstill_s: float = 0.0
    missing: str = ""
    """Nodes that had not joined."""


class LineDisplay:
    """Lines for a file or a pipe."""

    refresh_s = 1.0

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: Shown | None = None

    def show(self, state: RunState, now: float) -> None:
        """Print a line if one is due, and one for each recovery that has ended."""
        recoveries = [each for each in state.recoveries if each.is_done]
        num_shown = self._last.num_recoveries if self._last else 0
        for recovery in recoveries[num_shown:]:
            self._print(f"{state.recipe}: {render_recovery(recovery)}")
        if is_line_due(self._last, state, now):
            self._print(render_line(state, now))
            quiet_s = state.standstill_s(now) or 0.0
            self._last = Shown(
                state.phase,
                state.num_steps,
                now,
                len(recoveries),
                quiet_s,
                state.missing_text(now),
            )
        elif self._last:
            self._last = replace(self._last, num_recoveries=len(recoveries))

    def _print(self, line: str) -> None:
        self._console.print(Text(plain(line)), soft_wrap=True)

    def close(self) -> None:
        """Do nothing: every line is complete."""


def is_line_due(last: Shown | None, state: RunState, now: float) -> bool:
    """Return whether the state is worth a line after the one shown last."""
    if last is None or state.phase != last.phase or state.missing_text(now) != last.missing:
        return True
    if (quiet_s := state.standstill_s(now)) is not None and quiet_s >= 2 * last.standstill_s:
        return True
    num_new = state.num_steps - last.num_steps
    is_first = last.num_steps == 0 and num_new > 0
    is_late = now - last.time >= LINE_PERIOD_S
    return is_first or (is_late and num_new >= max(1, LINE_SHARE * (state.max_steps or 0)))


def render_line(state: RunState, now: float) -> str:
    """Return the state in one line, at `now` in unix seconds."""
    if state.phase != TRAINING or not state.num_steps:
        text = f"{state.phase} ({state.num_here} of {state.num_workers} workers)"
        more = (state.awaited_text(now), standstill_text(state.standstill_s(now)))
        return f"{state.recipe}: {', '.join(filter(None, (text, *more)))}"
    return f"{state.recipe}: step {state.steps_text}, {_numbers(state, now)}"


def render_state(state: RunState, now: float) -> RenderableType:
    """Return the state as a block for a terminal."""
    elapsed = "" if state.started_at is None else format_seconds(now - state.started_at)
    title = Text.assemble((state.recipe, "bold"), f"  {state.phase}  ", (elapsed, "dim"))
    bar = Table.grid(padding=(0, 1))
    steps = Text(f"step {state.steps_text}")
    if state.max_steps is not None:
        bar.add_row(ProgressBar(total=state.max_steps, completed=state.num_steps, width=40), steps)
    elif state.num_steps:
        bar.add_row(steps)
    lines: list[RenderableType] = [title, bar]
    if state.num_steps:
        lines.append(Text(plain(_numbers(state, now))))
    if state.recoveries:
        last = render_recovery(state.recoveries[-1], has_ended=state.exit_status is not None)
        lines.append(Text(plain(last), style="yellow"))
    lines += [
        Text.assemble((f"{node}  ", "dim"), state.node_phase(node))
        for node in state.nodes[:_NUM_NODES_SHOWN]
    ]
    if (more := len(state.nodes) - _NUM_NODES_SHOWN) > 0:
        lines.append(Text(f"and {more} more nodes", "dim"))
    if waits := state.awaited_text(now):
        lines.append(Text(plain(waits), "yellow"))
    return Group(*lines)


def render_recovery(recovery: Recovery, *, has_ended: bool = False) -> str:
    """Return what a fault was, when the next step came, and where ranks got their state.

    `has_ended` is whether the run has, so that no step comes any more.
    """
    text = f"fault {recovery.number}: {recovery.what}"
    if recovery.resumed_s is not None:
        text += f", recovered in {format_seconds(recovery.resumed_s)}"
    elif recovery.surrender is None:
        text += ", and no step came after it" if has_ended else ", recovering"
    notes = (recovery.roles, recovery.changes, recovery.fallback, recovery.surrender)
    return "; ".join([text, *(note for note in notes if note)])


def _numbers(state: RunState, now: float) -> str:
    parts = []
    if state.loss is not None:
        parts.append(f"loss {state.loss:.4f}")
    if state.lr is not None:
        parts.append(f"lr {state.lr:.3g}")
    if state.seconds_per_step is not None:
        parts.append(f"{state.seconds_per_step:.3g} s a step")
    quiet, left_s = standstill_text(state.standstill_s(now)), state.seconds_left
    if quiet or left_s is not None:
        parts.append(quiet or f"{format_seconds(left_s or 0.0)} left")
    newest = newest_saved(state.tiers)
    if missed := missed_text(state.tiers, now):
        parts.append(missed)
    elif newest:
        parts.append(f"checkpoint of step {newest.step}")
    if stored := storage_text(state.storage, newest.step if newest else None, now):
        parts.append(stored)
    return ", ".join(parts)
