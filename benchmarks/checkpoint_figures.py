"""From seconds of every lap to the table of checkpoints, and what it is held against. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

Laps = Mapping[str, Sequence[float]]
"""Values of every lap by what they are."""

COLUMNS = (
    "blocked",
    "own RAM",
    "peer RAM",
    "restore, living",
    "restore, new process",
    "restore from a peer",
)
OURS, DOOR, MINIMAL, MEMORY = "ours", "aws", "aws-minimal", "memory"
DOOR_FIGURES = ("own RAM", "restore, living")
BASE, REST, PEAK = "before the first save", "at rest", "peak"
REPLICAS = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a figure may be at most."""

    what: str
    figure: float
    bar: float

    @property
    def is_held(self) -> bool:
        """Say whether it is."""
        return self.figure <= self.bar

    def __str__(self) -> str:
        word = "held" if self.is_held else "NOT held"
        return f"{self.what}: {self.figure:.2f} (bar {self.bar:g}): {word}"


TIMES = {
    "blocked": 0.1,
    "in line": 1.3,
    "own RAM": 1.5,
    "peer RAM": 8.0,
    "restore, living": 2.0,
    "restore, new process": 6.0,
    "restore from a peer": 8.0,
}
"""In times of a clone."""


def judge(rows: Mapping[str, Laps], state_bytes: int) -> list[Bar]:
    """Compare what was measured with its bars."""
    bars = []
    if ours := rows.get(OURS):
        bars += [
            Bar(what=f"{name}, x clone", figure=factor(ours, name), bar=bar)
            for name, bar in TIMES.items()
        ]
    if (door := rows.get(DOOR)) and (minimal := rows.get(MINIMAL)):
        bars += [
            Bar(
                what=f"AWS's library, {name}: our door's time by the minimal daemon's",
                figure=statistics.median(door[name]) / statistics.median(minimal[name]),
                bar=1.0,
            )
            for name in DOOR_FIGURES
        ]
    if memory := rows.get(MEMORY):
        base, rest, peak = (statistics.median(memory[each]) for each in (BASE, REST, PEAK))
        limit = (2 + REPLICAS) * 1.1
        bars += [
            Bar(what="memory at rest, x state", figure=(rest - base) / state_bytes, bar=limit),
            Bar(what="a save adds, x state", figure=(peak - rest) / state_bytes, bar=0.1),
        ]
    return bars


def factor(laps: Laps, name: str) -> float:
    """Return a figure's median in times of the median clone that was measured beside it."""
    return statistics.median(laps[name]) / statistics.median(laps["clone"])


def format_table(rows: Mapping[str, Laps], titles: Mapping[str, str]) -> list[str]:
    """Return the lines of a table in Markdown: seconds and times of the clone beside it."""
    lines = [f"| system | laps | clone | {' | '.join(COLUMNS)} |", "|---" * 9 + "|"]
    for name, laps in rows.items():
        if "clone" not in laps:
            continue
        cells = [format_cell(laps, each) for each in COLUMNS]
        clone_s = statistics.median(laps["clone"])
        lines.append(
            f"| {titles[name]} | {len(laps['clone'])} | {clone_s:.3f} | {' | '.join(cells)} |"
        )
        if "in line" in laps:
            cell = format_cell(laps, "in line")
            cells = " | ".join([cell, cell, *[""] * (len(COLUMNS) - 2)])
            lines.append(f"| the same in line | {len(laps['clone'])} | {clone_s:.3f} | {cells} |")
    return lines


def format_cell(laps: Laps, name: str) -> str:
    """Return seconds and times of a clone; nothing for what was not measured."""
    if name not in laps:
        return ""
    return f"{statistics.median(laps[name]):.3f} ({factor(laps, name):.2g} x)"
