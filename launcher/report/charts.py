"""A run's charts, as the plain data that Plotly draws. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from launcher.report.record import IDLE, RunRecord, Span, Step
from launcher.runstate import CHECKPOINT, PHASES, STARTING, TRAINING

Figure = dict[str, Any]

NUM_POINTS_MAX = 5000
NUM_RANKS_MAX = 64
_LINE = "#2f6f9f"
_GENERATION_LINES = ("#9aa5b1", "#b58900", "#7a5195", "#2a9d8f")
_COLORS = {
    STARTING: "#8d99ae",
    "process group": "#7a5195",
    "data": "#d08c2e",
    "model": "#c8553d",
    TRAINING: "#2f8f5b",
    CHECKPOINT: "#2f6f9f",
    IDLE: "#dfe3e8",
}
_TIMELINE_PHASES = (*PHASES[:-1], IDLE)


def loss_chart(record: RunRecord) -> Figure:
    """Return the loss over steps, a line for each generation."""
    traces = [
        _line([step.step + 1 for step in steps], [step.loss for step in steps], name, color)
        for name, color, steps in _generations(record)
    ]
    return {"data": traces, "layout": _layout("step", "loss", has_legend=len(traces) > 1)}


def duration_chart(record: RunRecord) -> Figure:
    """Return the seconds that steps took."""
    traces = [
        _line([step.step + 1 for step in steps], [step.duration_s for step in steps], name, color)
        for name, color, steps in _generations(record)
    ]
    layout = _layout("step", "seconds a step", has_legend=len(traces) > 1)
    layout["yaxis"]["rangemode"] = "tozero"
    return {"data": traces, "layout": layout}


def timeline_chart(record: RunRecord) -> Figure:
    """Return what each rank did when, a row for each of the first ranks."""
    ranks = sorted({span.rank for span in record.spans})[:NUM_RANKS_MAX]
    nodes = {span.rank: span.node for span in record.spans}
    labels = {rank: html.escape(f"{nodes[rank]} rank {rank}") for rank in ranks}
    traces = [
        _bars(phase, [span for span in record.spans if span.phase == phase], labels)
        for phase in _TIMELINE_PHASES
    ]
    layout = _layout("seconds since the run's start", "", has_legend=True)
    layout["barmode"] = "overlay"
    layout["bargap"] = 0.25
    layout["height"] = 110 + 26 * len(ranks)
    layout["yaxis"] |= {
        "type": "category",
        "categoryarray": [labels[rank] for rank in ranks],
        "autorange": "reversed",
        "showgrid": False,
        "ticksuffix": "  ",
    }
    layout["hovermode"] = "closest"
    return {"data": [trace for trace in traces if trace["y"]], "layout": layout}


def thin(steps: Sequence[Step]) -> list[Step]:
    """Return at most about 5000 of the steps, evenly spread, the last among them."""
    stride = math.ceil(len(steps) / NUM_POINTS_MAX) or 1
    kept = list(steps[::stride])
    return kept if not steps or kept[-1] == steps[-1] else [*kept, steps[-1]]


def _generations(record: RunRecord) -> list[tuple[str, str, list[Step]]]:
    """Return (name, colour, steps) for each generation; the last has the main colour."""
    numbers = sorted({step.generation for step in record.steps})
    earlier = len(numbers) - 1
    return [
        (
            f"generation {number}",
            _LINE if place == earlier else _GENERATION_LINES[place % len(_GENERATION_LINES)],
            thin([step for step in record.steps if step.generation == number]),
        )
        for place, number in enumerate(numbers)
    ]


def _line(steps: list[int], values: list[float | None], name: str, color: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "markers",
        "name": name,
        "x": steps,
        # A gap is the honest picture of what is no number.
        "y": [value if value is not None and math.isfinite(value) else None for value in values],
        "line": {"color": color, "width": 2},
        "hovertemplate": "step %{x}: %{y:.4g}<extra></extra>",
    }


def _bars(phase: str, spans: list[Span], labels: dict[int, str]) -> Figure:
    shown = [span for span in spans if span.rank in labels]
    return {
        "type": "bar",
        "orientation": "h",
        "name": phase,
        "y": [labels[span.rank] for span in shown],
        "base": [round(span.start_s, 4) for span in shown],
        "x": [round(span.end_s - span.start_s, 4) for span in shown],
        "marker": {"color": _COLORS[phase]},
        "hovertemplate": f"%{{y}}: {phase}, %{{x:.2f}} s from %{{base:.2f}} s<extra></extra>",
    }


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
