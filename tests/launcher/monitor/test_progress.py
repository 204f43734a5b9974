from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from io import StringIO

import pytest
from rich.console import Console

from launcher.monitor.duration import format_seconds
from launcher.monitor.progress import Shown, is_line_due, open_display, render_line, render_state
from launcher.monitor.runstate import RunState, next_state, start_state
from resilience.events import Event
from tests.launcher.local_job import local_job
from tests.launcher.run_events import all_ranks, event, step_event, whole_run

START = start_state(local_job("trainer.max_steps=4"), ["node-0", "node-1"])


def state_after(events: Iterable[Event], state: RunState = START) -> RunState:
    return reduce(next_state, events, state)


def drawn(state: RunState, now: float = 100.0) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(render_state(state, now))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("until", "phase"),
    [
        (101.0, "starting workers"),
        (102.0, "process group"),
        (105.0, "data"),
        (106.0, "model"),
        (108.0, "training"),
        (113.0, "checkpoint"),
        (115.0, "training"),
        (116.0, "finished"),
    ],
)
def test_phase_follows_the_events(until: float, phase: str) -> None:
    assert state_after(each for each in whole_run() if each.time <= until).phase == phase


def test_run_waits_for_its_last_worker_and_says_on_which_node() -> None:
    events = [each for each in whole_run() if each.time <= 105.0 and each.rank != 3]
    late = event("worker_started", 102.0, 3)

    missing, behind = state_after(events), state_after([*events, late])

    assert (missing.phase, missing.node_phase("node-0")) == ("starting workers", "data")
    assert (behind.phase, behind.node_phase("node-1")) == ("process group", "process group")


def test_first_failure_is_kept_as_the_cause() -> None:
    first = event("worker_failed", 110.0, 2, message="bad")

    state = state_after([first, event("worker_failed", 109.0, 0, message="reset by peer")])

    assert state.failure == first
    assert (state.phase, state.node_phase("node-1")) == ("failed", "failed")


def test_failure_of_workers_that_others_followed_is_not_the_cause() -> None:
    first = event("worker_failed", 110.0, 2, message="bad")
    again = event("worker_started", 120.0, 2, generation=1)
    second = event("worker_failed", 130.0, 2, generation=1, message="worse")

    assert state_after([first, again, second]).failure == second


def test_new_generation_begins_again_and_the_old_one_is_not_heard() -> None:
    again = event("worker_started", 130.0, 0, generation=1)

    state = state_after([*whole_run()[:-2], again, step_event(9, 131.0)])

    assert (state.generation, state.num_steps, len(state.workers)) == (1, 0, 1)


def test_pace_and_time_left_come_from_the_newest_steps() -> None:
    slow = [step_event(number, 0.0, duration_s=9.0) for number in range(2)]
    fast = [step_event(number, 0.0, duration_s=2.0) for number in range(2, 22)]
    start = start_state(local_job("trainer.max_steps=32"), ["node-0", "node-1"])

    state = state_after([*slow, *fast], start)

    assert (state.seconds_per_step, state.seconds_left) == (2.0, 20.0)


def test_line_of_a_step_has_its_numbers() -> None:
    state = state_after(each for each in whole_run() if each.time <= 110.0)

    assert render_line(state, 0.0) == (
        "llama/llama3_tiny_pretrain: step 2 of 4, loss 3.0000, lr 0.001, 0.5 s a step, 1.0 s left"
    )


def test_loss_that_is_no_number_is_shown_as_such() -> None:
    state = state_after([*all_ranks("model_ready", 1.0), step_event(0, 2.0, "NaN")])

    assert "loss nan" in render_line(state, 0.0)


def test_block_for_a_terminal_shows_run_step_and_nodes() -> None:
    text = drawn(state_after(each for each in whole_run() if each.time <= 110.0), now=112.0)

    assert "llama/llama3_tiny_pretrain  training  12 s" in text
    assert "step 2 of 4" in text
    assert "loss 3.0000, lr 0.001, 0.5 s a step, 1.0 s left" in text
    assert "node-0  training" in text
    assert "node-1  training" in text


def test_block_stays_short_with_many_nodes() -> None:
    text = drawn(start_state(local_job(), [f"node-{index}" for index in range(100)]))

    assert "node-7 " in text
    assert "and 92 more nodes" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
    ("last", "num_steps", "now", "is_due"),
    [
        pytest.param(None, 0, 0.0, True, id="first"),
        pytest.param(Shown("data", 0, 0.0), 0, 0.1, True, id="another-phase"),
        pytest.param(Shown("training", 0, 0.0), 1, 0.1, True, id="first-step"),
        pytest.param(Shown("training", 1, 0.0), 99, 9.0, False, id="many-steps-too-soon"),
        pytest.param(Shown("training", 1, 0.0), 10, 60.0, False, id="long-time-few-steps"),
        pytest.param(Shown("training", 1, 0.0), 11, 10.0, True, id="both"),
    ],
)
def test_when_a_plain_line_is_due(
    last: Shown | None, num_steps: int, now: float, is_due: bool
) -> None:
    start = start_state(local_job("trainer.max_steps=100"), ["node-0", "node-1"])
    steps = [step_event(number, now) for number in range(num_steps)]

    state = state_after([*all_ranks("model_ready", 0.0), *steps], start)

    assert is_line_due(last, state, now) == is_due


@pytest.mark.parametrize(
    ("after_s", "told_s", "is_due"),
    [(4.0, 0.0, False), (6.0, 0.0, True), (9.0, 6.0, False), (12.0, 6.0, True)],
)
def test_standstill_is_told_when_it_begins_and_each_time_it_has_doubled(
    after_s: float, told_s: float, is_due: bool
) -> None:
    steps = [step_event(number, 100.0 + number, duration_s=1.0) for number in range(3)]
    state = state_after([*all_ranks("model_ready", 99.0), *steps])
    now = 102.0 + after_s

    assert is_line_due(Shown("training", 3, 102.0, 0, told_s), state, now) == is_due
    assert ("no step for" in render_line(state, now)) == (after_s > 5.0)


def test_console_says_once_which_nodes_have_not_joined() -> None:
    file = StringIO()
    state = state_after([event("agent_started", 100.0, at="node-0", start="7-0")])
    display = open_display(Console(file=file, width=40))

    for now in (129.0, 130.0, 131.0):
        display.show(state, now)

    told = "waiting for 2 of 2 nodes: node-0 has not joined, no agent has begun on 1 of them"
    start = "llama/llama3_tiny_pretrain: starting workers (0 of 4 workers)"
    assert file.getvalue().splitlines() == [start, f"{start}, {told}"]
    assert told in drawn(state, 131.0)


def test_console_that_is_no_terminal_gets_plain_lines() -> None:
    file = StringIO()
    display = open_display(Console(file=file, width=40))

    for each in whole_run():
        display.show(state_after(e for e in whole_run() if e.time <= each.time), each.time)
    display.close()

    lines = file.getvalue().splitlines()
    assert lines[0] == "llama/llama3_tiny_pretrain: starting workers (0 of 4 workers)"
    assert lines[-1] == "llama/llama3_tiny_pretrain: finished (4 of 4 workers)"
    assert "\x1b" not in file.getvalue()


def test_terminal_keeps_the_last_state() -> None:
    file = StringIO()
    display = open_display(Console(file=file, width=80, force_terminal=True))

    display.show(state_after(whole_run()), 120.0)
    display.close()
    display.close()

    assert "step 4 of 4" in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0.0 s"),
        (4.24, "4.2 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (200.0, "3 min 20 s"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
