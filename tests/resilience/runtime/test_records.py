"""Dataclasses to JSON and back."""

from __future__ import annotations

import pytest

from resilience.runtime.records import from_json, read_record, to_json
from resilience.tiered.catalog import StepAt


def test_what_is_written_is_read_back() -> None:
    steps = {"run": frozenset({StepAt(step=2, generation=-1), StepAt(step=1, generation=0)})}

    assert read_record(dict[str, frozenset[StepAt]], from_json(to_json(steps)), "steps") == steps


@pytest.mark.parametrize("step", ["1", True, -1, 1 << 63, float("inf"), None])
def test_unknown_fields_and_other_values_are_refused(step: object) -> None:
    with pytest.raises(ValueError, match=r"the step cannot be read: step .*: Input should be"):
        read_record(StepAt, {"step": step, "generation": 0}, "step")
    with pytest.raises(ValueError, match="the step cannot be read: more 1: no field has this name"):
        read_record(StepAt, {"step": 1, "generation": 0, "more": 1}, "step")
