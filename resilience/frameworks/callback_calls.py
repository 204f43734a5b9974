"""Calls of a Trainer's callbacks, each once, where a step or a log is run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience.script import log

_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
"""Values of a Trainer's line, and their names in the run's log."""


class CallbackCalls:
    """Stands between a Trainer and its callbacks; made for one call of train().

    Where a step or a log is run again, a callback is not called twice: the flags that its first
    call left are restored. Calls of on_log wait for `deliver_lines`. With `writes_log` the run's
    log gets their losses, too.
    """

    def __init__(self, handler: Any, *, writes_log: bool) -> None:
        self._handler = handler
        self._writes_log = writes_log
        self.is_calling = False
        """A callback is being called."""
        self._part: tuple[str, int] = ("", -1)
        self._flags: list[dict[str, bool]] = []
        """Flags of control after each call in this part of the program."""
        self._num_calls = 0
        self._holds_lines = False
        self._lines: list[Callable[[], object]] = []
        self._call_all = handler.call_event
        handler.call_event = self._call

    def begin_part(self, part: str, step: int, *, holds_lines: bool = False) -> None:
        """Begin a part of the program, or the same one again; `holds_lines` has on_log wait."""
        if self._part != (part, step):
            self._part, self._flags = (part, step), []
        self._num_calls, self._holds_lines = 0, holds_lines
        self._lines.clear()

    def deliver_lines(self) -> None:
        """Call on_log for the lines that have waited."""
        self._holds_lines = False
        lines, self._lines = self._lines, []
        for deliver in lines:
            deliver()

    def restore_handler(self) -> None:
        """Have the Trainer call its callbacks itself."""
        self._handler.call_event = self._call_all

    def _log(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
        if self._writes_log and args.process_index == 0 and "loss" in logs:
            values = {own: logs[name] for name, own in _LOGGED.items() if name in logs}
            log(state.global_step, **values)

    def _call(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        if event == "on_log" and self._holds_lines:
            given = {**given, "logs": dict(given["logs"])}
            self._lines.append(lambda: self._call("on_log", args, state, control, **given))
            return control
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if number < len(self._flags):
            vars(control).update(self._flags[number])
            return control
        if event == "on_log":
            self._log(args, state, given["logs"])
        self.is_calling = True
        try:
            control = self._call_all(event, args, state, control, **given)
        finally:
            self.is_calling = False
        self._flags.append(dict(vars(control)))
        return control
