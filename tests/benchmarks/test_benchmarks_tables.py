from __future__ import annotations

from benchmarks import goodput, recovery
from benchmarks.events import Event
from benchmarks.faultbench import Run
from benchmarks.figures import FaultFigures
from benchmarks.peers import find_reason


def figures_of(recovery_s, survivors_s=1.0, ranks_lost=0):
    return FaultFigures(
        kind="kill",
        rank=1,
        step=8,
        recovery_s=recovery_s,
        survivors_s=survivors_s,
        steps_lost=0,
        samples_lost=2,
        ranks_lost=ranks_lost,
    )


def test_row_shows_median_and_what_each_fault_cost():
    faults = [figures_of(2.0), figures_of(4.0), figures_of(3.0)]
    row = recovery.Row(
        system="a", kind="kill", planned=3, faults=faults, is_equal=True, normal_step_s=0.1
    )

    assert recovery.render_row(row, 60) == (
        "| a | kill | 3.00 (2.00-4.00) [3 of 3] | 1.00 (1.00-1.00) "
        "| 0 0 0 | 2 2 2 | 0 0 0 | yes | 100 |"
    )


def test_row_says_what_did_not_come_back():
    lame = recovery.Row(system="a", kind="kill", planned=1, faults=[figures_of(None)])
    dead = recovery.Row(system="a", kind="kill", planned=1, faults=[figures_of(None, None, 4)])
    absent = recovery.Row(system="a", kind="kill", note="absent: nothing to start yet")

    assert "never whole again [0 of 1] | 1.00" in recovery.render_row(lame, 60)
    assert "no recovery within 60 s [0 of 1] | -" in recovery.render_row(dead, 60)
    assert "absent: nothing to start yet" in recovery.render_row(absent, 60)


def test_row_says_that_a_run_was_given_up_after_some_recoveries():
    ends = ["stalled RuntimeError: no", "finished"]
    row = recovery.Row(system="a", kind="kill", planned=2, faults=[figures_of(2.0)], ends=ends)

    assert "| 2.00, then stalled [1 of 2] |" in recovery.render_row(row, 60)


def test_peer_that_is_not_installed_is_named_with_its_reason():
    text = "torchrun\tinstalled\ttorch 2.13.0\nnvrx\tmissing\tERROR: No matching distribution\n"

    assert find_reason(text, "torchrun") is None
    assert find_reason(text, "nvrx") == "not installed: ERROR: No matching distribution"
    assert "installer ended before torchft" in find_reason(text, "torchft")


def make_run(began_s):
    commits = [
        Event(10 + step * 0.5, "committed", rank, rank, {"step": step, "world": 2, "loss": "aa"})
        for step in range(8)
        for rank in range(2)
    ]
    more = [
        Event(12.2, "faulted", 1, 1, {"step": 4, "kind": "stop", "index": 0}),
        Event(12.6, "merged", 1, 1, {"kind": "kill", "index": 1}),
        Event(13.2, "rescued", 1, 9, {"victim": 1}),
    ]
    events = sorted(commits + more, key=lambda event: event.at_s)
    return Run(end="window over", events=tuple(events), began_s=began_s, words="")


def test_goodput_counts_steps_samples_and_events_of_the_window():
    result = goodput.judge_run(make_run(11.0), system="a", seed=1, seconds=4)

    assert (result.steps_per_s, result.samples_per_s) == (1.5, 6.0)
    assert result.num_events == {"faulted": 1, "merged": 1, "rescued": 1}
    assert goodput.render_time_line(result, result).splitlines() == [
        "a, seed 1 (worst), 1 s of 4 without a kept step",
        "   sR",
        "  ###.",
    ]


def test_window_that_never_opened_has_no_steps():
    result = goodput.judge_run(make_run(None), system="a", seed=1, seconds=4)

    assert (result.steps_per_s, result.by_second) == (0.0, [0, 0, 0, 0])


def test_goodput_row_is_relative_to_the_undisturbed_run():
    quiet = goodput.Result(
        system="a", seed=None, end="window over", steps_per_s=3.0, samples_per_s=24.0
    )
    result = goodput.judge_run(make_run(11.0), system="a", seed=1, seconds=4)
    result.planned = 2

    assert goodput.render_result(result, quiet) == (
        "| a | 1 | 1.50 of 3.00 | 50.0% | 25.0% | 1 of 2 | 1 | none | window over |"
    )
