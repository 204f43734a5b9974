from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from resilience.frameworks.callback_calls import CallbackCalls


class Handler:
    """Notes the calls that reach callbacks; an evaluation stops the training."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def call_event(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        self.called.append(event)
        control.should_stop = control.should_stop or event == "on_evaluate"
        return control


ARGUMENTS = SimpleNamespace(process_index=0)
STATE = SimpleNamespace(global_step=3)


def test_call_that_is_made_again_is_left_out_and_its_flags_are_put_back() -> None:
    handler = Handler()
    calls = CallbackCalls(handler, writes_log=False)
    for _ in range(2):
        control = SimpleNamespace(should_stop=False)
        calls.begin_part("end of a step", 3)
        handler.call_event("on_evaluate", ARGUMENTS, STATE, control)
        assert control.should_stop
    handler.call_event("on_save", ARGUMENTS, STATE, control)

    assert handler.called == ["on_evaluate", "on_save"]


def test_next_step_calls_anew() -> None:
    handler, control = Handler(), SimpleNamespace(should_stop=False)
    calls = CallbackCalls(handler, writes_log=False)
    for step in (3, 4):
        calls.begin_part("step", step)
        handler.call_event("on_step_begin", ARGUMENTS, STATE, control)

    assert handler.called == ["on_step_begin"] * 2


def test_lines_wait_and_those_of_a_broken_try_are_forgotten() -> None:
    handler, control = Handler(), SimpleNamespace(should_stop=False)
    calls = CallbackCalls(handler, writes_log=False)
    for _ in range(2):
        calls.begin_part("end of a step", 3, holds_lines=True)
        handler.call_event("on_log", ARGUMENTS, STATE, control, logs={"loss": 1.0})
    assert handler.called == []

    calls.deliver_lines()
    calls.restore_handler()

    assert handler.called == ["on_log"]
    assert handler.call_event.__self__ is handler  # type: ignore[attr-defined]
