from __future__ import annotations

import pytest

from benchmarks import overhead_figures as figures
from benchmarks import overhead_memory
from benchmarks.events import Event
from benchmarks.overhead_figures import Sample

MIB = 1 << 20


def commit(at_s, step, pid):
    return Event(at_s, "committed", pid % 100, pid, {"step": step})


def fault(at_s, step, kind, pid):
    return Event(at_s, "faulted", pid % 100, pid, {"step": step, "kind": kind})


def test_pairs_are_judged_by_their_median_and_an_interval():
    """The interval of few pairs spans all of them."""
    ratio = figures.judge_pairs([1 + index / 100 for index in range(101)], [1.0] * 101)
    of_few = figures.judge_pairs([2.0, 4.0], [1.0, 1.0])

    assert (ratio.low, ratio.median, ratio.high) == (1.4, 1.5, 1.6)
    assert ratio.of_sums == pytest.approx(1.5)
    assert (of_few.low, of_few.median, of_few.high) == (2.0, 3.0, 4.0)


def test_step_lasts_from_the_first_begin_to_the_last_end():
    ranks = [[[0.0, 1.0, 4.0]], [[0.5, 2.0, 5.0]]]

    assert figures.join_spans(ranks) == [5.0]


def test_memory_is_told_by_kind_of_process_at_its_time():
    """A spare that has become a rank counts as one from then on."""
    agent = {1: 5 * MIB}
    samples = [Sample(at_s=at_s, agent=agent, workers={100: 30, 101: 20}) for at_s in (1.0, 3.0)]

    early, late = (figures.name_ranks(each, {100: 0.5, 101: 2.0}) for each in samples)

    assert (early.ranks, early.spares) == (30, 20)
    assert (late.ranks, late.spares) == (50, 0)
    assert early.total == late.total == 5 * MIB + 50


def test_memory_is_judged_in_calm_and_in_each_recovery():
    events = [
        *(commit(step, step, pid) for step in range(5) for pid in (100, 101)),
        fault(4.5, 5, "kill", 101),
        *(commit(6.0 + step, step, pid) for step in (5, 6) for pid in (100, 102)),
    ]
    sizes = {3.5: 100, 5.0: 120, 13.0: 500}
    samples = [
        Sample(at_s=at_s, agent={1: 10}, workers={100: size, 102: 7})
        for at_s, size in sizes.items()
    ]

    on = overhead_memory.judge("on", samples, events, 2)

    assert (on.peak, on.peak_without_spares, on.agent, on.spares) == (117, 110, 10, 7)
    assert on.recoveries == {"kill": 137}


def test_memory_without_a_recovery_has_no_peak_of_one():
    events = [commit(step, step, 100) for step in range(6)] + [fault(7.0, 6, "kill", 100)]

    assert figures.recovery_windows(events, 1) == []
    with pytest.raises(ValueError, match="no rank has committed step 9"):
        figures.calm_window(events, 9)
