"""Calls of callbacks, each once, where a part of the program is run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CallsOnce:
    """Notes what the calls of a part of the program have left, for a part that is run again.

    Lines for loggers wait until they are taken: those of a broken try are forgotten.
    """

    def __init__(self) -> None:
        self.is_calling = False
        """A callback is being called."""
        self._part: tuple[str, int] = ("", -1)
        self._effects: list[Any] = []
        """Effects of the calls in this part of the program, which a second try restores."""
        self._num_calls = 0
        self.lines: list[Any] = []
        """Lines for loggers that wait."""
        self._lines_before: list[Any] = []

    def begin_part(self, part: str, step: int) -> None:
        """Begin a part of the program, or the same one again."""
        if self._part != (part, step):
            self._part, self._effects, self._lines_before = (part, step), [], self.lines
        self._num_calls, self.lines = 0, list(self._lines_before)

    def call_once(
        self,
        call: Callable[[], object],
        *,
        read: Callable[[], Any] = lambda: None,
        restore: Callable[[Any], object] = lambda effect: None,
    ) -> None:
        """Make a call and note what it has left; or restore that, where it was made before."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if number < len(self._effects):
            restore(self._effects[number])
            return
        self.is_calling = True
        try:
            call()
        finally:
            self.is_calling = False
        self._effects.append(read())
