"""A run's charts, as the plain data that Plotly draws. Pure."""

from __future__ import annotations

import bisect
import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from launcher.monitor.checkpoints import FAILED, LOADED, SAVED, UNREADABLE
from launcher.monitor.phases import CHECKPOINT, PHASES, RECOVERY, STARTING, TRAINING
from launcher.monitor.recoveries import Recovery
from launcher.report.record import IDLE, RunRecord, Span, Step

Figure = dict[str, Any]
Point = TypeVar("Point")

NUM_POINTS_MAX = 5000
NUM_RANKS_MAX = 64
_LINE = "#2f6f9f"
_FAULT = "#b3261e"
_INJECTED = "#8a5a00"
_GENERATION_LINES = ("#9aa5b1", "#b58900", "#7a5195", "#2a9d8f")
_COLORS = {
    STARTING: "#8d99ae",
    "process group": "#7a5195",
    "data": "#d08c2e",
    "model": "#c8553d",
    RECOVERY: "#e0b020",
    TRAINING: "#2f8f5b",
    CHECKPOINT: "#2f6f9f",
    IDLE: "#dfe3e8",
}
_START = "#2f6f9f"
_CHECKPOINTS = "checkpoints"
"""The row of the time line above the ranks."""
_MARKS = {
    SAVED: ("checkpoint taken", "#2f6f9f", "circle"),
    FAILED: ("checkpoint failed", _FAULT, "x"),
    UNREADABLE: ("checkpoint not loadable", _FAULT, "x-open"),
    LOADED: ("checkpoint loaded", "#7a5195", "triangle-down"),
}
_TIMELINE_PHASES = (*PHASES[:-1], IDLE)


def loss_chart(record: RunRecord) -> Figure:
    """Return the loss over steps, a line for each time it went back; starts and faults marked."""
    traces = [*_lines(record, lambda step: step.loss), *_start_points(record)]
    traces += _fault_points(record)
    return {"data": traces, "layout": _layout("step", "loss", has_legend=len(traces) > 1)}


def step_chart(
    record: RunRecord, label: str, value_of: Callable[[Step], float | None], **axis: str
) -> Figure:
    """Return a number that each step has, over steps; `axis` is what else its axis is."""
    traces = _lines(record, value_of)
    layout = _layout("step", label, has_legend=len(traces) > 1)
    layout["yaxis"] |= {"rangemode": "tozero", **axis}
    return {"data": traces, "layout": layout}


def size_chart(record: RunRecord) -> Figure:
    """Return how many workers the run had over time; nothing of one that kept its size."""
    data = []
    if len({size.num_workers for size in record.sizes}) > 1:
        ends = ((size, at) for size in record.sizes for at in (size.start_s, size.end_s))
        shown = thin([(at, size.num_workers) for size, at in ends])
        data = [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "workers",
                "x": [round(at_s, 4) for at_s, _ in shown],
                "y": [num_workers for _, num_workers in shown],
                "line": {"color": _LINE, "width": 2},
                "hovertemplate": "%{x:.2f} s: %{y} workers<extra></extra>",
            }
        ]
    layout = _layout("seconds since the run's start", "workers", has_legend=False)
    layout["yaxis"]["rangemode"] = "tozero"
    return {"data": data, "layout": layout}


def timeline_chart(record: RunRecord) -> Figure:
    """Return what each rank did when; of many ranks, what those that failed and the first did."""
    failed = {recovery.rank for recovery in record.recoveries}
    known = sorted(
        {span.rank for span in record.spans}, key=lambda rank: (rank not in failed, rank)
    )
    ranks = sorted(known[:NUM_RANKS_MAX])
    nodes = {span.rank: span.node for span in record.spans}
    labels = {rank: html.escape(f"{nodes[rank]} rank {rank}") for rank in ranks}
    traces = [
        _bars(phase, [span for span in record.spans if span.phase == phase], labels)
        for phase in _TIMELINE_PHASES
    ]
    traces += _checkpoint_marks(record)
    rows = [*([_CHECKPOINTS] if record.state.tiers else []), *(labels[rank] for rank in ranks)]
    layout = _layout("seconds since the run's start", "", has_legend=True)
    layout["barmode"] = "overlay"
    layout["bargap"] = 0.25
    layout["height"] = 110 + 26 * len(rows)
    layout["yaxis"] |= {
        "type": "category",
        "categoryarray": rows,
        "autorange": "reversed",
        "showgrid": False,
        "ticksuffix": "  ",
    }
    layout["hovermode"] = "closest"
    marks = [_fault_line(record, recovery) for recovery in record.recoveries]
    layout["shapes"] = [shape for shape, _ in marks]
    layout["annotations"] = [annotation for _, annotation in marks]
    if marks:
        # The numbers of the faults stand above the bars, and the legend above them.
        layout["margin"]["t"] += 20
        layout["height"] += 20
        layout["legend"]["y"] = 1.02 + 20 / (26 * max(1, len(rows)))
    return {"data": [trace for trace in traces if trace["y"]], "layout": layout}


def thin(points: Sequence[Point]) -> list[Point]:
    """Return at most about 5000 of the points, evenly spread, the last among them."""
    stride = math.ceil(len(points) / NUM_POINTS_MAX) or 1
    kept = list(points[::stride])
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _lines(record: RunRecord, value_of: Callable[[Step], float | None]) -> list[Figure]:
    """Return a curve of a value for each line of steps; the last has the main colour."""
    last = len(record.lines) - 1
    colors = [_GENERATION_LINES[place % len(_GENERATION_LINES)] for place in range(last)]
    lines = zip(record.lines, [*colors, _LINE], strict=False)
    return [_line(steps, value_of, color) for steps, color in lines]


def _line_name(steps: Sequence[Step]) -> str:
    first, last = steps[0].generation, steps[-1].generation
    return f"generation {first}" if first == last else f"generations {first} to {last}"


def _start_points(record: RunRecord) -> list[Figure]:
    """Return a mark on the curve where each start of the run but its first took over."""
    taken = [step for line in record.lines for step in line]
    firsts = [step for before, step in itertools.pairwise(taken) if step.start > before.start]
    if not firsts:
        return []
    return [
        _marks(
            ("start", _START, "diamond-open"),
            x=[step.step + 1 for step in firsts],
            y=[_finite(step.loss) for step in firsts],
            texts=[f"start {step.start} of the run: step {step.step + 1}" for step in firsts],
        )
    ]


def _fault_points(record: RunRecord) -> list[Figure]:
    """Return a mark on the curve for each fault: those that were injected, and the others."""
    losses = {step.step + 1: step.loss for line in record.lines for step in line}
    numbers = sorted(losses)
    traces = []
    for name, color, is_injected in (("injected fault", _INJECTED, True), ("fault", _FAULT, False)):
        # The newest step that was reported before the fault; before the first there is no curve.
        points = [
            (recovery, numbers[place - 1])
            for recovery in record.recoveries
            if recovery.is_injected == is_injected
            and (place := bisect.bisect_right(numbers, recovery.step or 0))
        ]
        if points:
            traces.append(
                _marks(
                    (name, color, "x"),
                    x=[step for _, step in points],
                    y=[_finite(losses[step]) for _, step in points],
                    texts=[fault_label(recovery) for recovery, _ in points],
                )
            )
    return traces


def _marks(
    look: tuple[str, str, str], *, x: Sequence[float], y: Sequence[object], texts: Sequence[str]
) -> Figure:
    """Return points with a text each; `look` is their name, colour and symbol."""
    name, color, symbol = look
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": x,
        "y": y,
        "text": [html.escape(text) for text in texts],
        "marker": {"color": color, "size": 9, "symbol": symbol},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _fault_line(record: RunRecord, recovery: Recovery) -> tuple[Figure, Figure]:
    """Return a line across all ranks at a fault, and the number above it."""
    color = _INJECTED if recovery.is_injected else _FAULT
    x = round(recovery.fault_at - record.start, 4)
    shape = {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "line": {"color": color, "width": 1.5, "dash": "dot"},
    }
    annotation = {
        "xref": "x",
        "yref": "paper",
        "x": x,
        "y": 1,
        "yanchor": "bottom",
        "showarrow": False,
        "text": str(recovery.number),
        "hovertext": html.escape(fault_label(recovery)),
        "font": {"color": color, "size": 12},
    }
    return shape, annotation


def fault_label(recovery: Recovery) -> str:
    """Return a fault by its number in the table of recoveries."""
    return f"fault {recovery.number}: {recovery.what}"


def _line(steps: Sequence[Step], value_of: Callable[[Step], float | None], color: str) -> Figure:
    shown = thin(steps)
    return {
        "type": "scatter",
        "mode": "lines" if len(shown) > 1 else "markers",
        "name": _line_name(steps),
        "x": [step.step + 1 for step in shown],
        "y": [_finite(value_of(step)) for step in shown],
        "line": {"color": color, "width": 2},
        "hovertemplate": "step %{x}: %{y:.4g}<extra></extra>",
    }


def _finite(value: float | None) -> float | None:
    """Return a value to draw: a gap is the honest picture of what is no number."""
    return value if value is not None and math.isfinite(value) else None


def _bars(phase: str, spans: list[Span], labels: dict[int, str]) -> Figure:
    shown = [span for span in spans if span.rank in labels]
    return {
        "type": "bar",
        "orientation": "h",
        "name": phase,
        "y": [labels[span.rank] for span in shown],
        "base": [round(span.start_s, 4) for span in shown],
        "x": [round(span.end_s - span.start_s, 4) for span in shown],
        "marker": {"color": _COLORS[phase], **_outline(phase)},
        "hovertemplate": f"%{{y}}: {phase}, %{{x:.2f}} s from %{{base:.2f}} s<extra></extra>",
    }


def _outline(phase: str) -> Figure:
    """Return a line around the bars of recovery: a short one in a long run is seen as well."""
    return {"line": {"color": _COLORS[phase], "width": 3}} if phase == RECOVERY else {}


def _checkpoint_marks(record: RunRecord) -> list[Figure]:
    """Return a mark for each checkpoint that was taken, failed or was loaded."""
    traces = []
    for kind, look in _MARKS.items():
        shown = thin([each for each in record.state.tiers if each.kind == kind])
        times = [round(each.time - record.start, 4) for each in shown]
        texts = [each.what for each in shown]
        traces.append(_marks(look, x=times, y=[_CHECKPOINTS] * len(shown), texts=texts))
    return traces


def _layout(x_title: str, y_title: str, *, has_legend: bool) -> Figure:
    axis = {"gridcolor": "#e6e9ed", "zeroline": False, "automargin": True}
    return {
        "height": 320,
        "margin": {"l": 60, "r": 20, "t": 36 if has_legend else 10, "b": 50},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#22303c"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "hovermode": "x unified",
        "showlegend": has_legend,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {**axis, "title": {"text": x_title}},
        "yaxis": {**axis, "title": {"text": y_title}},
    }
