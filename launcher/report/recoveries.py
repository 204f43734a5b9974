"""The report's table of recoveries: what ended a generation, and what the way back took. Pure."""

from __future__ import annotations

import html

from launcher.monitor.duration import format_seconds
from launcher.monitor.recoveries import Recovery
from launcher.report.record import RunRecord

_TITLES = (
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
# The columns that may be broken into several lines.
_WORDS = {"what", "who"}
_CAPTION = (
    "A row for each generation that ended, with the seconds from the fault until it was detected, "
    "until the last rank had stopped, until the ranks had a process group again, until the last "
    "had its state, and until the first step was done."
)
_NOT_REACHED = "-"


def recoveries_card(record: RunRecord) -> str:
    """Return the table as a part of the page, nothing for a run without a fault."""
    if not record.recoveries:
        return ""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in _TITLES)
    rows = "".join(_row(recovery, record.start) for recovery in record.recoveries)
    return (
        '<section class="card"><h2>Recoveries</h2><div class="scroll"><table class="recoveries">'
        f"<tr>{head}</tr>{rows}</table></div>"
        f'<p class="about">{html.escape(_CAPTION)}</p></section>'
    )


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


def _row(recovery: Recovery, start: float) -> str:
    label = '<span class="injected">injected</span> ' if recovery.is_injected else ""
    cells = []
    for title, text in zip(_TITLES, recovery_cells(recovery, start), strict=True):
        kind = ' class="words"' if title in _WORDS else ""
        cells.append(f"<td{kind}>{label if title == 'what' else ''}{html.escape(text)}</td>")
    return f"<tr>{''.join(cells)}</tr>"


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
