from __future__ import annotations

from benchmarks import goodput
from benchmarks.events import Event
from benchmarks.faultbench import Run
from benchmarks.peers import find_reason


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
