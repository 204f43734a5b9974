"""Limits of code lines and of processor seconds: reading `budgets.yaml`, and judging by it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("budgets.yaml")
SLACK_MAX = 200
"""A package that stays further below its limit has to write its reduction down."""
ROOM = "room/"
"""Prefix of an allowance that no package has taken yet, or of lines that are still to go."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One change of the limits: by how many code lines that of each package moves."""

    why: str
    lines: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The whole file."""

    code_lines: list[Entry]
    processor_seconds: list[int]
    """Of `make test`, from the first limit to the one that holds."""


def parse_budgets(text: str) -> Budgets:
    """Return what a text of `budgets.yaml` says.

    Raises:
        KeyError, TypeError: It has another form.
    """
    raw: dict[str, Any] = yaml.safe_load(text)
    return Budgets(
        code_lines=[Entry(**each) for each in raw["code_lines"]],
        processor_seconds=list(raw["processor_seconds"]),
    )


def read() -> Budgets:
    """Return what the file says now."""
    return parse_budgets(FILE.read_text("utf-8"))


def limits(entries: Sequence[Entry]) -> dict[str, int]:
    """Return the limit of each package, and what is left of each room."""
    total: Counter[str] = Counter()
    for entry in entries:
        for package, lines in entry.lines.items():
            total[package] += lines
    return dict(total)


def judge_lines(lines: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Return what is wrong about the code lines of packages."""
    allowed = {name: n for name, n in limits.items() if n and not name.startswith(ROOM)}
    problems = []
    for package in sorted({*lines, *allowed}):
        n, limit = lines.get(package, 0), allowed.get(package, 0)
        words = f"{package} has {n} code lines, its limit is {limit}: "
        if n > limit:
            problems.append(f"{words}take {n - limit} from another package or from a room")
        elif limit - n > SLACK_MAX:
            problems.append(f"{words}append the reduction to tests/budgets.yaml")
    return problems


def judge_history(versions: Sequence[Budgets]) -> list[str]:
    """Return what is wrong about versions of the file, the first committed one first."""
    problems = []
    for older, newer in itertools.pairwise(versions):
        for field in ("code_lines", "processor_seconds"):
            kept = getattr(older, field)
            if getattr(newer, field)[: len(kept)] != kept:
                problems.append(f"an entry of {field} was changed, which may only be appended to")
    first, last = versions[0], versions[-1]
    problems += [
        f"{entry.why}: adds {sum(entry.lines.values())} code lines in all"
        for entry in last.code_lines[len(first.code_lines) :]
        if sum(entry.lines.values()) > 0
    ]
    if sorted(last.processor_seconds, reverse=True) != last.processor_seconds:
        problems.append("processor_seconds become more")
    return problems
