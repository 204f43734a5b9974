"""A number of a plan, with how it comes about and where that is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of a plan."""

    name: str
    value: float
    unit: Literal["bytes", "number", "hours", "days", "seconds"]
    formula: str
    """How the value is computed, with the job's own numbers."""
    source: str
    """Where the formula or its numbers come from."""


def add_up(figures: tuple[Figure, ...]) -> int:
    """Return the bytes of several figures together."""
    return sum(round(figure.value) for figure in figures)


def in_gib(num_bytes: float) -> str:
    """Return bytes as GiB with their unit, to three digits where there are fewer than a hundred."""
    size = num_bytes / GIB
    return f"{size:,.0f} GiB" if size >= 100 else f"{size:.3g} GiB"
