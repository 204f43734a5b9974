from __future__ import annotations

from functools import reduce

import pytest

from launcher.monitor.meeting import Meeting, next_meeting
from resilience.events import Event
from tests.launcher.run_events import event


def begun(*nodes: str) -> list[Event]:
    return [event("agent_started", 100.0, at=node, start="7-0") for node in nodes]


def joined(leader: str, *nodes: str) -> list[Event]:
    return [event("node_joined", 101.0, at=leader, node=node) for node in nodes]


LOST = event("node_lost", 102.0, at="b", node="c", is_dead=False)
ALONE = [*joined("a", "a"), *joined("b", "b")]


@pytest.mark.parametrize(
    ("events", "after_s", "missing"),
    [
        pytest.param([], 99.0, "", id="nothing-is-known"),
        pytest.param(begun("a"), 29.0, "", id="usual"),
        pytest.param(
            begun("a"), 30.0, "3: a has not joined, no agent has begun on 2 of them", id="one"
        ),
        pytest.param(
            [*begun("a", "b", "c"), *joined("b", "a", "b")], 30.0, "1: c has not joined", id="late"
        ),
        pytest.param(
            [*begun("a", "b"), *joined("b", "a", "b")],
            30.0,
            "1: no agent has begun on 1 of them",
            id="absent",
        ),
        pytest.param(
            [*begun("a", "b", "c"), *ALONE, *joined("b", "c")], 30.0, "1: a has not joined",
            id="two-coordinators",
        ),
        pytest.param(
            [*begun("a", "b", "c"), *joined("b", "a", "b", "c"), LOST], 30.0,
            "1: c has not joined", id="lost-again",
        ),
        pytest.param(
            [*begun("a", "b", "c"), *joined("b", "a", "b", "c"), *begun("b")], 30.0,
            "3: a, b, c have not joined", id="coordinator-began-again",
        ),
        pytest.param([*begun("a", "b", "c"), *joined("b", "a", "b", "c")], 30.0, "", id="all"),
    ],
)  # fmt: skip
def test_which_nodes_have_not_joined(events: list[Event], after_s: float, missing: str) -> None:
    meeting = reduce(next_meeting, events, Meeting())
    num, colon, text = missing.partition(": ")
    wanted = f"waiting for {num} of 3 nodes: {text}" if colon else ""
    assert meeting.missing_text(3, 100.0 + after_s) == wanted


def test_count_and_names_agree_where_a_node_stands_by() -> None:
    meeting = reduce(next_meeting, [*begun("a", "b", "c"), *joined("b", "b", "c")], Meeting())
    assert meeting.missing_text(2, 130.0) == "waiting for 1 of 3 nodes: a has not joined"
