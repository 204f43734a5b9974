"""What a producer makes and lets go, whatever its consumers do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience.data.window import Plan, Reader, Span, Window, WindowLimits, keep_from, plan

LIMITS = WindowLimits(
    prefetch_length=4,
    lookback_length=2,
    checkpoint_frequency=None,
    budget_bytes=1_000,
    is_validation=False,
)


def window(*positions: int, spans: tuple[tuple[int, int], ...] = (), **changes: object) -> Window:
    """Return a window over segments of 10 bytes a batch, given as (first, end)."""
    limits = {key: changes.pop(key) for key in list(changes) if hasattr(LIMITS, key)}
    result = Window(
        limits=replace(LIMITS, **limits),  # type: ignore[arg-type]
        spans=tuple(
            Span(serial=serial, first=first, end=end, num_bytes=10 * (end - first))
            for serial, (first, end) in enumerate(spans, start=1)
        ),
        readers=tuple(Reader(position=each) for each in positions),
        batch_bytes=10,
        segment_bytes=10,
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def waiting(state: Window, number: int) -> Window:
    return replace(state, readers=(*state.readers, Reader(position=number, is_waiting=True)))


@pytest.mark.parametrize(
    ("state", "number"),
    [
        pytest.param(window(), None, id="nobody-is-there"),
        pytest.param(window(7), 7, id="the-first"),
        pytest.param(window(7, spans=((7, 9),)), 9, id="the-next"),
        pytest.param(window(7, spans=((7, 9), (9, 12))), None, id="enough-ahead"),
        pytest.param(window(20, 7, spans=((7, 9),)), 9, id="ahead-of-the-slowest"),
        pytest.param(window(0, spans=((0, 2), (3, 5))), 2, id="a-hole"),
        pytest.param(waiting(window(0), 90), 90, id="what-is-waited-for-comes-first"),
        pytest.param(waiting(waiting(window(0), 90), 50), 50, id="the-earliest-of-it"),
        pytest.param(window(0, spans=((0, 2),), end=2), None, id="the-end"),
        pytest.param(window(0, spans=((0, 2),), failed=frozenset({2})), None, id="an-error"),
        pytest.param(waiting(window(8, spans=((8, 13),), end=9), 9), None, id="after-the-end"),
    ],
)
def test_which_batch_is_made(state: Window, number: int | None) -> None:
    assert plan(state).produce == number


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        pytest.param(window(10), 8, id="lookback"),
        pytest.param(window(10, 30), 8, id="slowest"),
        pytest.param(window(100, checkpoint=40), 40, id="told-checkpoint"),
        pytest.param(window(30, checkpoint=40), 28, id="older-than-the-checkpoint"),
        pytest.param(window(99, checkpoint_frequency=20), 60, id="the-one-before-the-last"),
        pytest.param(window(99, checkpoint_frequency=20, checkpoint=80), 80, id="told-beats-rule"),
        pytest.param(window(99, is_validation=True, checkpoint_frequency=20), 97, id="validation"),
    ],
)
def test_nothing_goes_that_a_resume_could_need(state: Window, kept: int) -> None:
    assert keep_from(state) == kept


def test_whole_segments_go_when_all_of_them_is_over() -> None:
    state = window(10, spans=((0, 4), (4, 8), (7, 15)))

    assert plan(state) == Plan(None, (1, 2), "has made all that may be made ahead")
    assert plan(window(9, spans=((0, 4), (4, 8), (8, 15)))).evict == (1,)


def test_a_consumer_that_has_left_is_waited_for() -> None:
    state = window(50, spans=((0, 8), (8, 60)))
    left = Reader(position=3, is_connected=False)

    assert plan(state).evict == (1,)
    assert plan(replace(state, readers=(*state.readers, left))).evict == ()


def test_the_first_batches_of_validation_stay_and_are_made_again() -> None:
    state = window(40, spans=((0, 2), (10, 20), (38, 45)), is_validation=True)

    assert plan(state) == Plan(2, (2,), "makes batch 2 ahead")


def test_nothing_is_made_ahead_beyond_the_budget() -> None:
    state = window(10, spans=((5, 12),), budget_bytes=75)

    assert plan(state).produce is None
    assert plan(state).evict == ()
    assert plan(replace(state, limits=replace(state.limits, budget_bytes=80))).produce == 12


def test_for_what_is_waited_for_old_segments_go_first() -> None:
    state = window(spans=((0, 5), (5, 10), (10, 12)), budget_bytes=120, checkpoint=0)

    planned = plan(waiting(state, 12))

    assert (planned.produce, planned.evict, planned.is_short) == (12, (2,), True)
    assert "budget" in planned.reason


def test_what_only_a_resume_needs_makes_room_ahead_the_newest_of_it_first() -> None:
    """A resume finds its first batches; what it needs next is made while it takes them."""
    spans = ((0, 5), (5, 10), (10, 12), (12, 15))
    state = window(14, spans=spans, budget_bytes=150, checkpoint=0)

    planned = plan(state)

    assert (planned.produce, planned.evict, planned.is_short) == (15, (3,), True)
    assert plan(replace(state, limits=replace(state.limits, lookback_length=14))).produce is None


def test_then_goes_what_is_needed_last() -> None:
    """One consumer is far behind: what it needs much later can be made again."""
    state = window(0, spans=((0, 5), (5, 10), (10, 12)), budget_bytes=120)

    planned = plan(waiting(state, 12))

    assert (planned.produce, planned.evict) == (12, (3,))


def test_what_consumers_are_at_never_goes() -> None:
    state = window(0, 11, spans=((0, 5), (10, 12)), budget_bytes=70)

    planned = plan(waiting(state, 30))

    assert (planned.produce, planned.evict, planned.blocked) == (None, (), 30)


def test_a_full_file_system_is_a_smaller_budget() -> None:
    state = window(10, spans=((8, 12),), room_bytes=40)

    assert plan(state).produce is None
    assert "file system" in plan(state).reason


def test_a_smaller_budget_than_before_is_kept_too() -> None:
    state = window(9, spans=((0, 5), (5, 9), (9, 12)), budget_bytes=80, checkpoint=0)

    assert plan(state).evict == (1,)
    assert plan(replace(state, limits=replace(state.limits, budget_bytes=30))).evict == (1, 2)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        pytest.param({}, 3, id="to-the-end-of-the-prefetch"),
        pytest.param({"batch_bytes": 20}, 2, id="as-many-as-the-segment-takes"),
        pytest.param({"failed": frozenset({3})}, 1, id="to-an-error"),
        pytest.param({"end": 4}, 2, id="to-the-end-of-the-stage"),
        pytest.param({"batch_bytes": 41, "segment_bytes": 41}, 1, id="a-new-segment"),
    ],
)
def test_how_many_are_planned_at_once(changes: dict[str, Any], count: int) -> None:
    state = window(0, **changes)
    span = Span(serial=1, first=0, end=2, num_bytes=100, free_bytes=40)

    planned = plan(replace(state, spans=(span,)))

    assert (planned.produce, planned.count) == (2, count)


def test_room_in_the_open_segment_costs_nothing() -> None:
    state = window(0, budget_bytes=100)
    span = Span(serial=1, first=0, end=2, num_bytes=100, free_bytes=10)

    assert plan(replace(state, spans=(span,))).produce == 2
    assert plan(replace(state, spans=(replace(span, free_bytes=9),))).produce is None


@st.composite
def histories(draw: st.DrawFn) -> tuple[WindowLimits, list[tuple[int, int]]]:
    """Draw limits, and moves as (consumer, step); a large step back is a resume."""
    limits = WindowLimits(
        prefetch_length=draw(st.integers(1, 12)),
        lookback_length=draw(st.integers(0, 6)),
        checkpoint_frequency=draw(st.none() | st.integers(1, 20)),
        budget_bytes=10 * draw(st.integers(9, 60)),
        is_validation=draw(st.booleans()),
    )
    moves = st.tuples(st.integers(0, 2), st.integers(-15, 3))
    return limits, draw(st.lists(moves, max_size=40))


class _Producer:
    """Does what the plan says; its segments hold 3 batches of 10 bytes."""

    def __init__(self, limits: WindowLimits) -> None:
        self.limits = limits
        self.positions = [0, 0, 0]
        self.spans: dict[int, Span] = {}
        self.serial = 0

    def has(self, number: int) -> bool:
        return any(each.first <= number < each.end for each in self.spans.values())

    def step(self, waiting_reader: int | None) -> Plan:
        readers = tuple(
            Reader(position=each, is_waiting=index == waiting_reader)
            for index, each in enumerate(self.positions)
        )
        planned = plan(
            Window(
                limits=self.limits,
                spans=tuple(self.spans.values()),
                readers=readers,
                batch_bytes=10,
                segment_bytes=30,
            )
        )
        floor = keep_from(Window(limits=self.limits, readers=readers))
        for each in planned.evict:
            assert self.spans.pop(each).end <= floor or planned.is_short
        if planned.produce is not None:
            self._store(planned.produce)
        assert sum(each.num_bytes for each in self.spans.values()) <= self.limits.budget_bytes
        return planned

    def _store(self, number: int) -> None:
        span = self.spans.get(self.serial)
        if span is None or span.end != number or span.free_bytes < 10:
            if span is not None:
                self.spans[self.serial] = replace(span, free_bytes=0)
            self.serial += 1
            span = Span(serial=self.serial, first=number, end=number, num_bytes=30, free_bytes=30)
        self.spans[self.serial] = replace(span, end=number + 1, free_bytes=span.free_bytes - 10)


@given(histories())
def test_everybody_gets_each_batch_within_the_budget(
    history: tuple[WindowLimits, list[tuple[int, int]]],
) -> None:
    limits, moves = history
    producer = _Producer(limits)

    for reader, step in moves:
        producer.positions[reader] = number = max(0, producer.positions[reader] + step)
        for _ in range(100):
            if producer.has(number):
                break
            assert producer.step(reader).produce is not None
        else:
            pytest.fail("the batch never comes")


@given(histories())
def test_what_is_planned_at_once_is_what_is_planned_one_by_one(
    history: tuple[WindowLimits, list[tuple[int, int]]],
) -> None:
    limits, moves = history
    producer = _Producer(limits)

    for reader, step in moves:
        producer.positions[reader] = max(0, producer.positions[reader] + step)
        expected: list[int] = []
        while (planned := producer.step(None)).produce is not None:
            if expected:
                assert (planned.produce, planned.evict) == (expected.pop(0), ())
            else:
                expected = [planned.produce + each for each in range(1, planned.count)]
        assert expected == []
