"""Sources that fail in every way.

As those of a scene they know numpy alone, so that their producers start fast.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import resilience.data
from resilience.data.sources import Start
from tests.resilience.data.scene import _write, count_up

PACKAGE = str(Path(resilience.data.__file__).parent)


class PickyError(Exception):
    """An error whose constructor fails when it is given what it has made of its argument."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        assert code in (1, 2)


class MuteError(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class ShardError(Exception):
    """An error that came of another."""


def _raise_chained() -> None:
    try:
        Path("/nowhere/shard-7").read_bytes()
    except OSError as error:
        raise ShardError("shard 7") from error


def _raise(error: Exception) -> None:
    raise error


RAISES: dict[str, Callable[[], None]] = {
    "index": lambda: _raise(IndexError("list index out of range")),
    "key": lambda: _raise(KeyError("tokens")),
    "file": lambda: Path("/nowhere/shard-7").touch(),
    "chained": _raise_chained,
    "picky": lambda: _raise(PickyError(1)),
    "mute": lambda: _raise(MuteError(1)),
    "long": lambda: _raise(ValueError("\u00e9" * 100_000)),
}


def raise_at(
    start: Start, *, kind: str, number: int, marker: str, log: str = ""
) -> Iterator[dict[str, Any]]:
    """Raise at a batch, as long as the marker is there."""
    for batch in count_up(start, log=log):
        if batch["number"] == number and Path(marker).exists():
            RAISES[kind]()
        yield batch


THINGS: dict[str, Any] = {
    "set": {1, 2},
    "function": print,
    "numbered": {1: 2},
    "objects": {"x": np.array([None])},
}


def yield_thing(start: Start, *, kind: str, log: str = "") -> Iterator[Any]:
    """Yield what is no batch, at batch 3."""
    for batch in count_up(start, log=log):
        yield THINGS[kind] if batch["number"] == 3 else batch


def grow_at(start: Start, *, number: int, log: str = "") -> Iterator[dict[str, Any]]:
    """Yield one batch that is far larger than the others."""
    for batch in count_up(start, log=log):
        yield {**batch, "more": np.zeros(1 << 21 if batch["number"] == number else 1, np.uint8)}


def give_nothing(*, log: str = "") -> None:
    """Return what nobody can iterate over."""


def fail_at_once(*, log: str = "") -> list[int]:
    raise FileNotFoundError(2, "No such file or directory", "corpus.bin")


class _Unreadable:
    def __iter__(self) -> Iterator[int]:
        raise PermissionError(13, "Permission denied", "corpus.bin")


def fail_to_begin(*, log: str = "") -> _Unreadable:
    return _Unreadable()


def read_version(
    start: Start, *, version_file: str, seed: int = 0, log: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield batches of a content that no recipe knows of."""
    version = Path(version_file).read_text()
    for batch in count_up(start, log=log):
        yield {**batch, "version": version, "seed": seed}


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
