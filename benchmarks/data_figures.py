"""From the values of every lap to the table of data, and what it is held against. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

Laps = Mapping[str, Sequence[float]]
"""Values of every lap by what they are."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What a row leaves."""

    laps: Laps
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Figures that could not be measured, and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table."""

    name: str
    unit: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a figure may be at most, or has to be at least."""

    what: str
    figure: float
    bar: float
    is_least: bool = False

    @property
    def is_held(self) -> bool:
        """Say whether it is."""
        return self.figure >= self.bar if self.is_least else self.figure <= self.bar

    def __str__(self) -> str:
        word = "held" if self.is_held else "NOT held"
        limit = "at least" if self.is_least else "at most"
        return f"{self.what}: {self.figure:.4g} (bar: {limit} {self.bar:g}): {word}"


READ, FLOW, RESUME, MEMORY = "read", "flow", "resume", "memory"

OURS, OURS_LONG = "ours", "ours, prefetch 64"
SLICE, ARRAY = "memmap slice", "memmap slice, numpy's sum"
LOADER_0, LOADER_1 = "DataLoader, no worker", "DataLoader, 1 worker"
STATEFUL_0, STATEFUL_1 = "StatefulDataLoader, no worker", "StatefulDataLoader, 1 worker"
MADE = "the producer alone"
AT_0, AT_FAR = "at sample 0", "at the far sample"
SOURCE_0, SOURCE_FAR = "the source alone, at sample 0", "the source alone, at the far sample"
MAPPED, GAINED, COPY = "mapped", "mapped, and what else they gained", "one copy"

FIGURES: Mapping[str, tuple[Figure, ...]] = {
    READ: tuple(
        Figure(name, "us")
        for name in (SLICE, ARRAY, OURS, OURS_LONG, LOADER_0, LOADER_1, STATEFUL_0, STATEFUL_1)
    ),
    FLOW: tuple(Figure(name, "1/s") for name in (MADE, OURS, LOADER_1, STATEFUL_1)),
    RESUME: tuple(Figure(name, "ms") for name in (AT_0, AT_FAR, SOURCE_0, SOURCE_FAR)),
    MEMORY: tuple(Figure(name, "MiB") for name in (COPY, MAPPED, GAINED)),
}

READ_TIMES, RATE, FLOW_TIMES, COPIES = 5.0, 2000.0, 1.0, 1.15
NOISE = 1.1
"""Medians of starts of a process are not nearer to each other than this."""


def judge(rows: Mapping[str, Measured]) -> list[Bar]:
    """Compare what was measured with its bars."""
    judges = {
        READ: _judge_read,
        FLOW: _judge_flow,
        RESUME: _judge_resume,
        MEMORY: _judge_memory,
    }
    return [
        bar
        for name, row in rows.items()
        for bar in judges[name]({key: statistics.median(laps) for key, laps in row.laps.items()})
    ]


def _judge_read(medians: Mapping[str, float]) -> list[Bar]:
    return [
        Bar(
            what="a cached batch, x memmap slice",
            figure=medians[OURS] / medians[SLICE],
            bar=READ_TIMES,
        )
    ]


def _judge_flow(medians: Mapping[str, float]) -> list[Bar]:
    return [
        Bar(what="producer, batches a second", figure=medians[MADE], bar=RATE, is_least=True),
        Bar(
            what="throughput, x DataLoader with 1 worker",
            figure=medians[OURS] / medians[LOADER_1],
            bar=FLOW_TIMES,
            is_least=True,
        ),
    ]


def _judge_resume(medians: Mapping[str, float]) -> list[Bar]:
    figure = medians[AT_FAR] / medians[AT_0]
    return [Bar(what="resume at the far sample, x at 0", figure=figure, bar=NOISE)]


def _judge_memory(medians: Mapping[str, float]) -> list[Bar]:
    copy = medians[COPY]
    return [
        Bar(what="mapped by all processes, x one copy", figure=medians[MAPPED] / copy, bar=COPIES),
        Bar(
            what="with all that they gained, x one copy", figure=medians[GAINED] / copy, bar=COPIES
        ),
    ]


def format_table(rows: Mapping[str, Measured]) -> list[str]:
    """Return the lines of a table in Markdown: medians, and from the least to the most."""
    lines = ["| row | figure | laps | median | least to most |", "|---" * 5 + "|"]
    return lines + [
        f"| {name} | {figure.name} | {format_values(row, figure)} |"
        for name, row in rows.items()
        for figure in FIGURES[name]
    ]


def format_values(row: Measured, figure: Figure) -> str:
    """Return the last cells of a line; a word for what was not measured."""
    laps = row.laps.get(figure.name)
    if not laps:
        return f"0 | {row.missing.get(figure.name, 'not measured')} | "
    unit = figure.unit and f" {figure.unit}"
    return (
        f"{len(laps)} | {format_number(statistics.median(laps))}{unit} "
        f"| {format_number(min(laps))} to {format_number(max(laps))}"
    )


def format_number(value: float) -> str:
    """Return a number with three figures that count, or whole."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
