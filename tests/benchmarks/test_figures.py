from __future__ import annotations

import pytest

from benchmarks import figures
from benchmarks.events import Event

STEP_S = 0.5


def commit(at_s, step, rank, *, world=4, pid=None, loss="00"):
    values = {"step": step, "world": world, "loss": loss}
    return Event(at_s, "committed", rank, 100 + rank if pid is None else pid, values)


def fault(at_s, step, rank=1, kind="kill"):
    return Event(at_s, "faulted", rank, 100 + rank, {"step": step, "kind": kind})


def finish(rank, digest):
    return Event(99.0, "finished", rank, 100 + rank, {"digest": digest})


def steps(first, last, began_s, ranks=range(4), **values):
    """Commits of some steps by some ranks, the first one at `began_s`."""
    return [
        commit(began_s + (step - first) * STEP_S, step, rank, **values)
        for step in range(first, last + 1)
        for rank in ranks
    ]


def judge(events):
    return figures.judge_faults(events, num_ranks=4, micro_batch=2)


def test_normal_step_leaves_out_warm_up_and_what_follows_a_fault():
    events = [commit(at_s, step, 0) for step, at_s in enumerate([0, 9, 10, 10.5, 11, 11.5])]
    events += [fault(11.6, 6), commit(40, 6, 0)]

    assert figures.normal_step_s(events) == STEP_S
    assert figures.normal_step_s([]) is None


def test_recovery_is_until_the_last_rank_has_the_faulted_step_less_a_normal_step():
    events = [*steps(0, 5, 0), fault(2.6, 6), *steps(6, 8, 5.0, range(3)), commit(6.2, 6, 3)]
    events.sort(key=lambda event: event.at_s)

    (one,) = judge(events)

    assert one.recovery_s == pytest.approx(6.2 - 2.6 - STEP_S)
    assert one.survivors_s == pytest.approx(5.0 - 2.6 - STEP_S)
    assert (one.steps_lost, one.samples_lost, one.ranks_lost) == (0, 0, 0)


def test_steps_done_again_are_lost_but_their_samples_are_not():
    events = [*steps(0, 5, 0), fault(2.6, 6), *steps(4, 8, 5.0, pid=7)]

    (one,) = judge(events)

    assert one.recovery_s == pytest.approx(5.0 + 2 * STEP_S - 2.6 - STEP_S)
    assert (one.steps_lost, one.samples_lost) == (2, 0)


def test_late_commit_of_a_rank_that_had_not_done_it_is_no_lost_step():
    events = [*steps(0, 5, 0, range(3)), *steps(0, 4, 0, [3])]
    events += [fault(2.6, 6), commit(2.7, 5, 3), *steps(6, 6, 5.0)]
    events.sort(key=lambda event: event.at_s)

    assert judge(events)[0].steps_lost == 0


def test_rank_that_stays_away_costs_its_samples_and_the_recovery():
    events = [*steps(0, 5, 0), fault(2.6, 6), *steps(6, 9, 5.0, range(3), world=3)]

    (one,) = judge(events)

    assert one.recovery_s is None
    assert one.survivors_s == pytest.approx(5.0 - 2.6 - STEP_S)
    assert (one.samples_lost, one.ranks_lost) == (8, 1)


def test_rank_that_comes_back_costs_only_the_steps_without_it():
    events = [*steps(0, 5, 0), fault(2.6, 6), *steps(6, 7, 5.0, [0, 2, 3], world=3)]
    events += steps(8, 9, 6.5)

    (one,) = judge(events)

    assert one.recovery_s == pytest.approx(6.5 - 2.6 - STEP_S)
    assert (one.samples_lost, one.ranks_lost) == (4, 0)


def test_two_worlds_are_those_whose_first_ranks_commit_in_turn():
    one = [commit(at_s, at_s, 0, pid=1) for at_s in range(10)]
    after = [commit(at_s, at_s, 0, pid=2) for at_s in range(12, 20)]
    beside = [commit(at_s, 0, 0, pid=3) for at_s in (7, 15)]

    assert figures.two_worlds_s([*one, *after, commit(5, 0, 1, pid=4)]) == 0
    assert figures.two_worlds_s([*one, *after, *beside]) == (9 - 7) + (15 - 12)


def test_fault_without_another_step_is_not_recovered():
    (one,) = judge([*steps(0, 5, 0), fault(2.6, 6)])

    assert (one.recovery_s, one.survivors_s, one.ranks_lost) == (None, None, 4)


def test_each_fault_is_judged_until_the_next_with_the_ranks_it_found():
    events = [*steps(0, 5, 0), fault(2.6, 6), *steps(6, 7, 5.0, range(3), world=3)]
    events += [fault(5.8, 8, rank=2), *steps(8, 8, 7.0, range(3), world=3)]

    first, second = judge(events)

    assert (first.recovery_s, first.ranks_lost) == (None, 1)
    assert second.recovery_s == pytest.approx(7.0 - 5.8 - STEP_S)
    assert (second.samples_lost, second.ranks_lost) == (0, 0)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        pytest.param("aaaa", "aaaa", True, id="equal"),
        pytest.param("aaaa", "bbbb", False, id="other-bits"),
        pytest.param("aaaa", "aaab", False, id="one-rank-differs"),
        pytest.param("aaab", "aaab", False, id="ranks-never-agreed"),
        pytest.param("aaaa", "", None, id="did-not-end"),
    ],
)
def test_equality_needs_one_digest_on_all_ranks_of_both_runs(left, right, equal):
    runs = [[finish(rank, digest) for rank, digest in enumerate(one)] for one in (left, right)]

    assert figures.is_equal(*runs) is equal


def test_only_steps_of_the_window_that_all_ranks_committed_are_kept():
    events = [*steps(0, 9, 0), *steps(10, 10, 5.0, range(3))]

    kept = figures.keep_steps(events, began_s=2.0, until_s=9.0)

    assert [one.step for one in kept] == [4, 5, 6, 7, 8, 9]
    assert [one.done_s for one in kept][:2] == [2.0, 2.5]
    assert figures.keep_steps(events, began_s=2.0, until_s=3.0) == kept[:2]


def test_steps_that_a_restore_undoes_are_kept_only_when_done_again():
    restored = Event(6.0, "restored", 0, 7, {"step": 7})
    events = [*steps(0, 9, 0), restored, *steps(7, 7, 7.0)]

    kept = figures.keep_steps(events, began_s=2.0, until_s=9.0)

    assert [(one.step, one.done_s) for one in kept][-2:] == [(6, 3.0), (7, 7.0)]


def test_restore_behind_the_window_does_not_count_old_steps_again():
    restored = Event(2.2, "restored", 0, 7, {"step": 1})
    events = [*steps(0, 4, 0), restored, *steps(1, 5, 3.0)]

    kept = figures.keep_steps(events, began_s=2.0, until_s=9.0)

    assert [one.step for one in kept] == [4, 5]


def test_steps_with_fewer_ranks_are_kept_with_their_world():
    events = [*steps(0, 1, 0), *steps(2, 3, 1.0, [0, 2, 3], world=3)]

    kept = figures.keep_steps(events, began_s=0.0, until_s=9.0)

    assert [one.world for one in kept] == [4, 4, 3, 3]


def test_time_line_shows_full_slow_and_idle_seconds():
    kept = figures.keep_steps([*steps(0, 3, 10.0), *steps(4, 4, 13.0)], 10.0, 14.0)

    counts = figures.count_by_second(kept, 10.0, 4)

    assert counts == [2, 2, 0, 1]
    assert figures.draw_time_line(counts, normal_per_s=2.0) == "##.+"
    assert figures.draw_marks([(0.2, "e"), (2.9, "k"), (9.0, "s")], 4) == "e k"


def test_first_difference_is_by_the_bits_of_the_last_loss_of_rank_0():
    quiet = [commit(step, step, rank, loss="aa") for step in range(4) for rank in range(2)]
    other = [commit(step, step, 0, loss="aa" if step < 2 else "ab") for step in range(4)]

    assert figures.first_difference(quiet, other) == 2
    assert figures.first_difference(quiet, [*other, *quiet]) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        pytest.param([1.0], "1.00", id="one"),
        pytest.param([3.0, 1.0, 2.0], "2.00 (1.00-3.00)", id="several"),
    ],
)
def test_spread_is_median_and_extremes(values, words):
    assert figures.spread(values) == words
