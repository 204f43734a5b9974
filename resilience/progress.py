"""Steps of a training program, found in its output by named patterns or a user's. Pure.

A pattern is a regular expression with named groups. `step` is the number of the step; `loss`, `lr`,
`grad_norm` and any further group are values of that step. Step and values may stand in lines of
their own: values without a step belong to the step that was shown last, or to the first one. With
`epoch` and `total` the step is one of an epoch of so many. With `total` alone it is that of a bar,
and bars with another total are passed over. With neither, a step that falls back begins a
new epoch, and is counted on.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LINE_CHARACTERS_MAX = 512
"""A line is looked at so far: a search may take the square of a line's length, or more."""
_DIGITS_MAX = 11
_TEXT_MAX = 100
_NUMBERS = ("epoch", "total", "step")
_KEPT_NAMES = ("rank", "start", "duration_s", "printed")
"""Fields of the event of a step that are the run's own."""
_LOSS = r"(?:.*[ ,](?:train_)?loss(?:_step)?=(?P<loss>[^ ,\]]+))?"
_BAR = r"(?P<step>\d+)/(?P<total>\d+) \["
NAMED: Mapping[str, tuple[str, ...]] = {
    "lightning": (rf"^Epoch (?P<epoch>\d+): .*\| {_BAR}{_LOSS}",),
    "megatron": (
        (
            r"\biteration +(?P<step>\d+)/ *(?P<total>\d+) \|(?:.* learning rate: (?P<lr>\S+))?"
            r"(?:.* lm loss: (?P<loss>\S+))?(?:.* grad norm: (?P<grad_norm>\S+))?"
        ),
    ),
    "torchtitan": (
        (
            r"(?<!validate )\bstep: +(?P<step>\d+) +loss: +(?P<loss>\S+)"
            r"(?: +grad_norm: +(?P<grad_norm>\S+))?"
        ),
    ),
    "transformers": (
        rf"^ *\d+%\|.*\| {_BAR}",
        (
            r"^\{'loss': '?(?P<loss>[^',}]+)'?(?:, 'grad_norm': '?(?P<grad_norm>[^',}]+)'?)?"
            r"(?:, 'learning_rate': '?(?P<lr>[^',}]+)'?)?"
        ),
    ),
}
"""Patterns of common programs; each is tried on output that was recorded from them."""
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_PARSER = "re._parser" if sys.version_info >= (3, 11) else "sre_parse"
"""The standard library's own, of regular expressions."""
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def find_problem(patterns: Sequence[str]) -> str | None:
    """Return what is wrong with names and regular expressions, in one line; None where all work."""
    has_step = not patterns or any(pattern in NAMED for pattern in patterns)
    for pattern in (each for each in patterns if each not in NAMED):
        try:
            groups = re.compile(pattern).groupindex
            parsed = importlib.import_module(_PARSER).parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return f"'{pattern}' is no regular expression: {error}"
        if _have_nested_repeats(parsed):
            return f"'{pattern}' has a repeat within a repeat, which can take for ever on a line"
        if kept := sorted(set(groups) & set(_KEPT_NAMES)):
            return f"'{pattern}' has a group {kept[0]}, a name that the run keeps for itself"
        if not groups:
            return f"'{pattern}' is none of {', '.join(NAMED)}, and has no group (?P<step>\\d+)"
        has_step = has_step or "step" in groups
    shown = "', '".join(patterns)
    return None if has_step else f"no group (?P<step>\\d+) is in '{shown}'"


def _have_nested_repeats(part: Any, depth: int = 0) -> bool:
    """Return whether a part of a parsed expression repeats what repeats something itself."""
    if isinstance(part, tuple) and str(part[0]) in _REPEATS:
        low, high, part = part[1]
        depth += high > 1 and low != high
    is_composed = isinstance(part, (tuple, list)) or type(part).__name__ == "SubPattern"
    return depth > 1 or (is_composed and any(_have_nested_repeats(each, depth) for each in part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that a program has shown."""

    number: int
    seen_s: float
    values: Mapping[str, float | str] = field(default_factory=dict)


class Progress:
    """The steps of one process, line by line."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Look for these names and regular expressions, all of which have to be without problem."""
        texts = (each for pattern in patterns for each in NAMED.get(pattern, (pattern,)))
        self._patterns = [re.compile(text) for text in texts]
        self.has_late_values = len(self._patterns) > 1 or any(each in NAMED for each in patterns)
        """Whether values of a step may follow it, in a line of their own or as a bar is redrawn."""
        self.shown: Step | None = None
        """The step that was shown last, while values of it may follow."""
        self._last = self._raw = -1
        self._base = 0
        self._total: int | None = None
        self._values: dict[str, float | str] = {}
        """Values for which no step was there."""

    def feed(self, line: str, now_s: float) -> Step | None:
        """Take in a line; returns the step before, once another one is shown."""
        line = _CONTROLS.sub("", line[:LINE_CHARACTERS_MAX])
        found: dict[str, str] = {}
        for pattern in self._patterns:
            if match := pattern.search(line):
                found |= {name: text for name, text in match.groupdict().items() if text}
        if not found:
            return None
        number = self._count(found) if "step" in found else None
        if "step" in found and number is None:
            return None
        values = {name: _read(text) for name, text in found.items() if name not in _NUMBERS}
        before, number = self.shown, self._last if number is None else number
        if number > self._last:
            values = self._values | values
            self.shown, self._last = Step(number=number, seen_s=now_s, values=values), number
            self._values = {}
            return before
        if before is not None and number == before.number:
            self.shown = Step(
                number=number, seen_s=before.seen_s, values={**before.values, **values}
            )
        elif "step" not in found:
            self._values |= values
        return None

    def pop(self) -> Step | None:
        """Return the step that was shown last, once: no values are waited for any more."""
        shown, self.shown = self.shown, None
        return shown

    def _count(self, found: Mapping[str, str]) -> int | None:
        """Return the step's number in the run; None for what is no step of the training."""
        epoch, total, raw = (_whole(found.get(name)) for name in _NUMBERS)
        if raw is None:
            return None
        if total is not None:
            if epoch is not None:
                return epoch * total + raw if raw else None
            self._total = self._total or total
            return raw if raw and total == self._total else None
        if raw < self._raw:
            self._base += self._raw + (raw == 0)
        self._raw = raw
        return self._base + raw


def _whole(text: str | None) -> int | None:
    digits = (text or "").replace(",", "").strip()
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS_MAX
    return int(digits) if is_number else None


def _read(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text[:_TEXT_MAX]
