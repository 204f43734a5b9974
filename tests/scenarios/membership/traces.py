"""What the events of a run say of its generations, held against the promise of one world."""

from __future__ import annotations

from collections.abc import Sequence

from resilience.events import Event

_ENTRIES = ("process_group_ready", "rank_recovered", "rank_resumed")
"""What a rank writes on its way into a generation."""


def check_one_world(events: Sequence[Event]) -> None:
    """Assert that a run went on in one place at a time, by events of one machine's clock.

    - No generation was opened twice.
    - Once a gate of a generation was passed anywhere, no rank came into an older one, and none of
      an older one passed a gate. A run that is begun anew goes on with higher numbers.
    - A step that was passed in two generations had the same outcome, bit for bit.
    """
    opened = [each.fields["number"] for each in events if each.event == "generation_opened"]
    assert len(opened) == len(set(opened)), f"a generation was opened twice: {opened}"
    newest, by_whom = -1, None
    outcomes: dict[int | None, tuple[object, object]] = {}
    for each in sorted(events, key=lambda event: event.time):
        if each.event in _ENTRIES or each.event == "step":
            assert each.generation >= newest, f"{each}, after {by_whom}"
        if each.event == "step":
            outcome = (each.fields["loss"], each.fields["grad_norm"])
            assert outcomes.setdefault(each.step, outcome) == outcome, each
        if _passed_gate(each) and each.generation > newest:
            newest, by_whom = each.generation, each


def _passed_gate(event: Event) -> bool:
    """Return whether somebody passed a gate of the event's generation, which is then over.

    The first step event of a generation may be the last one of the generation before, once more.
    """
    if event.event == "step":
        return event.fields["duration_s"] is not None
    has_stopped_behind = event.event == "rank_stopped" and event.fields["phase"] == "passed"
    return has_stopped_behind or event.event == "rank_resumed"
