"""Sources that fail in every way.

As those of a scene they know numpy alone, so that their producers start fast.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import resilience.data
from resilience.data.sources import Start
from tests.resilience.data.scene import _write, count_up

PACKAGE = str(Path(resilience.data.__file__).parent)


def yield_a_set(start: Start, *, log: str = "") -> Iterator[Any]:
    """Yield what is no batch, at batch 3."""
    for batch in count_up(start, log=log):
        yield {1, 2} if batch["number"] == 3 else batch


def grow_at(start: Start, *, number: int, log: str = "") -> Iterator[dict[str, Any]]:
    """Yield one batch that is far larger than the others."""
    for batch in count_up(start, log=log):
        yield {**batch, "more": np.zeros(1 << 21 if batch["number"] == number else 1, np.uint8)}


class _Unreadable:
    def __iter__(self) -> Iterator[int]:
        raise PermissionError(13, "Permission denied", "corpus.bin")


def fail_to_begin(*, log: str = "") -> _Unreadable:
    return _Unreadable()


class _Countdown:
    """Kills the process at a line of the cache's own code."""

    def __init__(self, num_lines: int, log: str) -> None:
        self._num_lines = num_lines
        self._log = log

    def __call__(self, frame: FrameType, event: str, argument: object) -> _Countdown | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self._num_lines -= 1
            if self._num_lines == 0:
                _write(self._log, f"died {frame.f_code.co_name}")
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def die_at_lines(start: Start, *, plan: str, log: str = "") -> Iterator[dict[str, Any]]:
    """Die as soon as so many lines have run that store, publish and delete batches.

    Each opening takes the next number of the plan; when there is none, nobody dies.
    """
    lines = Path(plan).read_text().split()
    Path(plan).write_text(" ".join(lines[1:]))
    if lines:
        sys.settrace(_Countdown(int(lines[0]), log))
    yield from count_up(start, log=log)
