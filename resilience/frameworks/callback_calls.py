"""Calls of a Trainer's callbacks, each once, where a step or a log is run again."""

from __future__ import annotations

from typing import Any

from resilience.frameworks.calls_once import CallsOnce
from resilience.script import log

_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
"""Values of a Trainer's line, and their names in the run's log."""


class CallbackCalls(CallsOnce):
    """Stands between a Trainer and its callbacks; made for one call of train().

    Where a step or a log is run again, a callback is not called twice: the flags that its first
    call left are restored. Calls of on_log wait for `deliver_lines`. With `writes_log` the run's
    log gets their losses, too.
    """

    def __init__(self, handler: Any, *, writes_log: bool) -> None:
        super().__init__()
        self._handler = handler
        self._writes_log = writes_log
        self._holds_lines = False
        self._call_all = handler.call_event
        handler.call_event = self._call

    def begin_part(self, part: str, step: int, *, holds_lines: bool = False) -> None:
        """Begin a part of the program, or the same one again; `holds_lines` has on_log wait."""
        super().begin_part(part, step)
        self._holds_lines = holds_lines

    def deliver_lines(self) -> None:
        """Call on_log for the lines that have waited."""
        self._holds_lines = False
        lines, self.lines = self.lines, []
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
            self.lines.append(lambda: self._call("on_log", args, state, control, **given))
            return control

        def call() -> None:
            nonlocal control
            if event == "on_log":
                self._log(args, state, given["logs"])
            control = self._call_all(event, args, state, control, **given)

        self.call_once(
            call,
            read=lambda: dict(vars(control)),
            restore=lambda flags: vars(control).update(flags),
        )
        return control
