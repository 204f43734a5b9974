"""What the events of faults amount to: rows of a table, seconds, and words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from io import StringIO

import pytest
from rich.console import Console

from launcher.job import Job
from launcher.monitor.progress import open_display, render_line, render_recovery, render_state
from launcher.monitor.recoveries import Recovery, list_recoveries, next_generations, seconds_lost
from launcher.monitor.runstate import RunState, next_state, start_state
from launcher.report import summary_text
from launcher.report.page import build_page, summary_rows
from launcher.report.record import RunRecord, build_record
from launcher.report.recoveries import recovery_cells
from resilience.events import Event
from tests.launcher.monitor.test_progress import drawn
from tests.launcher.run_events import (
    all_ranks,
    event,
    faulty_run,
    on_node,
    recovery,
    refounded_run,
    step_event,
    whole_run,
)
from tests.launcher.script_job import script_job
from tests.launcher.shipped import shipped_job, with_values

JOB = shipped_job("llama/llama3_tiny_checkpointless", "local")


def recoveries_of(events: Sequence[Event]) -> tuple[Recovery, ...]:
    return list_recoveries(reduce(next_generations, events, {}))


def record_of(events: Sequence[Event]) -> RunRecord:
    return build_record(JOB, events)


def state_after(events: Sequence[Event], nodes: Sequence[str] = ("node-0", "node-1")) -> RunState:
    return reduce(next_state, events, start_state(JOB, nodes))


def seconds(found: Recovery) -> list[float | None]:
    times = (found.detected_s, found.stopped_s, found.rebuilt_s, found.recovered_s, found.resumed_s)
    return [time if time is None else round(time, 3) for time in times]


def died(time: float, generation: int, rank: int = 2) -> Event:
    return event("fault_detected", time, rank, generation=generation, reason="died", text="killed")


def injected(time: float, kind: str, rank: int, generation: int = 0, step: int = 3) -> Event:
    return event("fault_injected", time, rank, step=step, generation=generation, fault_kind=kind,
                 place="backward")  # fmt: skip


def test_run_without_faults_has_none() -> None:
    assert recoveries_of(whole_run()) == ()
    assert "faults" not in summary_text(state_after(whole_run()), None)


def stood_still(fault: Event) -> list[Event]:
    """Return a run that takes a step a second, the last at 109, and none until the fault."""
    return [
        on_node("generation_opened", 100.5, 0, world_size=4),
        *all_ranks("model_ready", 104.0),
        *(step_event(number, 105.0 + number, duration_s=1.0) for number in range(5)),
        fault,
        *recovery(fault.time, 0, 5),
    ]


@pytest.mark.parametrize(
    ("reason", "told", "time", "began"),
    [
        pytest.param("hung", {"quiet_s": 30.0}, 140.0, 110.0, id="hang-that-its-agent-has-timed"),
        pytest.param("hung", {"quiet_s": 600.0}, 140.0, 100.5, id="not-before-its-generation"),
        pytest.param("died", {"quiet_s": 0.0}, 140.0, 109.0, id="ranks-gave-up-waiting"),
        pytest.param("node lost", {}, 121.0, 109.0, id="silent-node-in-an-older-log"),
        pytest.param("died", {"quiet_s": 0.0}, 110.5, 110.5, id="noticed-as-it-happened"),
    ],
)
def test_fault_began_with_the_last_progress(
    reason: str, told: dict[str, float], time: float, began: float
) -> None:
    fault = event("fault_detected", time, 2, reason=reason, text="x", **told)

    (found,) = state_after(stood_still(fault)).recoveries

    assert found.fault_at == began
    assert seconds(found)[0] == time - began
    assert seconds(found)[-1] == time - began + 2.0


@pytest.mark.parametrize("seed", range(20))
def test_order_in_which_events_are_read_does_not_matter(seed: int) -> None:
    events = faulty_run()
    random.Random(seed).shuffle(events)

    assert recoveries_of(events) == recoveries_of(faulty_run())


@pytest.mark.parametrize(
    ("events", "what", "detected_s"),
    [
        pytest.param([died(5.0, 0)], "rank 2: died", 0.0, id="nobody-injected-it"),
        pytest.param([injected(4.0, "sigkill", 2), died(5.0, 0)],
                     "rank 2: injected sigkill in backward", 1.0, id="injected"),
        pytest.param([injected(3.0, "exception", 1), injected(4.0, "sigkill", 2), died(5.0, 0)],
                     "rank 2: injected sigkill in backward", 1.0, id="of-the-rank-that-died"),
        pytest.param([injected(4.0, "sigkill", 1), died(5.0, 0)],
                     "rank 1: injected sigkill in backward", 1.0, id="seen-by-another-rank"),
        pytest.param([event("fault_detected", 4.9, 3, reason="exception", text="reset by peer"),
                      died(5.0, 0)], "rank 2: died", 0.0, id="peers-complain-first"),
        pytest.param([event("fault_detected", 3.0, 3, reason="exception", text="bad"),
                      died(9.0, 0)], "rank 3: exception", 0.0, id="one-that-does-not-stop-dies"),
        pytest.param([injected(4.0, "slow", 1), died(5.0, 0)], "rank 2: died", 0.0,
                     id="slowness-ends-nothing"),
        pytest.param([injected(4.0, "sigkill", 2, generation=1), died(5.0, 0)], "rank 2: died",
                     0.0, id="of-another-generation"),
        pytest.param([injected(6.0, "sigkill", 2), died(5.0, 0)], "rank 2: died", 0.0,
                     id="only-later"),
        pytest.param([on_node("generation_broken", 5.0, 0, reason="node-1 is gone")],
                     "node-1 is gone", 0.0, id="coordinator-alone"),
    ],
)  # fmt: skip
def test_cause_of_a_fault(events: list[Event], what: str, detected_s: float) -> None:
    (found,) = recoveries_of(events)

    assert (found.what, found.detected_s) == (what, detected_s)


def test_fault_in_a_recovery_ends_that_one_and_counts_once() -> None:
    cut_short = [each for each in recovery(10.0, 0, 3) if each.time <= 11.0]
    again = [injected(11.2, "sigkill", 1, generation=1), died(11.4, 1, rank=1)]

    found = recoveries_of([died(10.0, 0), *cut_short, *again, *recovery(11.4, 1, 3)])

    assert [each.is_done for each in found] == [False, True]
    assert seconds(found[0]) == [0.0, 0.5, 1.0, None, None]
    assert seconds_lost(found, 99.0) == pytest.approx(1.2 + 2.2)


def test_run_that_gives_up_is_lost_from_the_last_fault_on() -> None:
    gave_up = on_node("gave_up", 15.0, 0, reason="4 faults without progress")

    (found,) = recoveries_of([died(10.0, 0), gave_up])

    assert found.surrender == "4 faults without progress"
    assert seconds_lost([found], 20.0) == 10.0
    assert recovery_cells(found, 0.0)[-1] == "gave up: 4 faults without progress"


@pytest.mark.parametrize(
    ("source", "step", "lost", "words"),
    [
        ("", 4, 3, "back to the checkpoint: no copy of shard 1 is left"),
        ("start", 0, 7, "back to the start: no copy of shard 1 is left"),
    ],
)
def test_fallback_loses_steps(source: str, step: int, lost: int, words: str) -> None:
    steps = [step_event(number, float(number)) for number in range(7)]
    reason = "no copy of shard 1 is left"
    fallback = on_node("recovery_fallback", 10.7, 1, reason=reason, source=source)
    ways_back = recovery(10.0, 0, step, "started started started started")

    (found,) = recoveries_of([*steps, died(10.0, 0), fallback, *ways_back])

    assert (found.steps_lost, found.fallback) == (lost, words)
    assert found.roles == "4 started"


def test_loss_of_all_nodes_that_nobody_told_of_is_a_fault() -> None:
    """Its time is that of the last event of its ranks."""
    (found,) = recoveries_of(refounded_run())

    assert (found.what, found.text) == ("all nodes lost", "none of them was left to tell of it")
    assert (found.generation, found.fault_at, found.step, found.steps_lost) == (0, 108.0, 4, 2)
    assert seconds(found) == [None, None, 8.0, 9.6, 10.0]
    assert recoveries_of([each for each in refounded_run() if each.time < 117.5]) == ()


def test_run_that_goes_back_is_no_fault_of_its_own() -> None:
    """One was told of, the other ended as it was asked to, and the last begins a start of a run."""
    run = refounded_run()
    stopped = all_ranks("worker_stopped", 108.5)
    begun = [each for each in run if each.generation == 100]

    told = recoveries_of([*run, died(108.1, 0)])

    assert [(each.what, each.resumed_s) for each in told] == [("rank 2: died", pytest.approx(9.9))]
    assert recoveries_of([*run, *stopped]) == ()
    assert state_after([*run, event("run_continued", 200.0), *begun]).recoveries == ()


def test_lost_node_and_the_one_that_takes_over_are_named() -> None:
    changes = [
        on_node("node_lost", 10.1, 0, node="node-1"),
        on_node("node_joined", 10.2, 0, node="node-2"),
        on_node("node_joined", 90.0, 1, node="node-3"),
    ]

    (found,) = recoveries_of([died(10.0, 0), *changes, *recovery(10.0, 0, 3)])

    assert found.changes == "node-1 lost, node-2 joined"


def test_coordinator_that_comes_back_is_the_node_that_was_lost() -> None:
    """It has been silent: what it says of the generation that has ended is past."""
    events = [
        *whole_run(),
        on_node("coordinator_replaced", 3.0, 0, lost="node-1"),
        on_node("generation_opened", 3.2, 1),
        on_node("node_lost", 9.0, 0, node="node-0"),
        on_node("fault_detected", 9.0, 0, reason="node lost", text="node-0 is gone"),
        on_node("generation_broken", 9.0, 0, reason="node-0 is gone"),
    ]

    (found,) = recoveries_of(events)

    assert (found.reason, found.fault_at) == ("node lost", 3.0)
    assert found.text == "node-1, which coordinated the run, is gone or silent"
    assert found.changes == "node-1 lost"


def test_run_that_has_gone_on_is_not_in_recovery_when_a_silent_node_stops_its_ranks() -> None:
    before = state_after([*whole_run()[:-8], *recovery(10.0, 0, 3)])
    assert (before.generation, before.phase) == (1, "training")

    after = next_state(before, event("rank_stopped", 60.0, 2, generation=0))

    assert after.phase == "training"


def test_row_of_the_table() -> None:
    record = record_of(faulty_run())
    roles = "2 kept, 1 repaired from rank 1, 1 rolled forward"

    assert [recovery_cells(each, record.start) for each in record.recoveries] == [
        ("1", "0", "8.0 s", "rank 1: exception in forward, step 3", "0.10 s", "0.50 s", "1.00 s",
         "1.50 s", "2.00 s", "0", "4 kept"),
        ("2", "1", "12 s", "rank 2: died, step 5: killed by SIGKILL", "0.00 s", "0.50 s",
         "1.00 s", "1.50 s", "2.00 s", "0", f"{roles} (2.0 MB); worker of rank 2 replaced"),
    ]  # fmt: skip


def test_page_has_the_table_and_labels_what_was_injected() -> None:
    page = build_page(record_of(faulty_run()), [], b"packed")

    table = page.partition("<h2>Recoveries</h2>")[2].partition("</table>")[0]
    assert table.count("<tr>") == 3
    assert table.count('<span class="injected">injected</span>') == 1
    assert "Recoveries" not in build_page(record_of(whole_run()), [], b"packed")


@pytest.mark.parametrize(
    ("until", "words"),
    [
        pytest.param(None, "2 (1 injected), 4.0 s lost, 20.0 % of the run, no step lost", id="not"),
        pytest.param(114.0, "2 (1 injected), 4.0 s lost, 20.0 % of the run", id="later"),
        pytest.param(
            113.0,
            "2 (1 injected), 10 s lost, 52.5 % of the run, the last was not recovered from",
            id="by-its-last-fault",
        ),
    ],
)
def test_run_that_failed_does_not_say_what_it_has_not_lost(until: float | None, words: str) -> None:
    """Whether its steps are lost depends on who starts it again, and from where."""
    events = faulty_run()
    if until is not None:
        ended = event("run_finished", 120.0, exit_status=75, reason="node-0 ended with 75")
        events = [*(each for each in events if each.time <= until), ended]

    assert dict(summary_rows(record_of(events)))["faults"] == words
    assert f"  faults      {words}\n" in summary_text(state_after(events), None)


def test_faults_that_no_protected_loop_has_met_are_told_at_the_end() -> None:
    fault = {"kind": "slow", "place": "gate", "step": 3, "rank": 1, "seconds": 1}
    values = {
        "resilience.checkpointless": JOB.model_dump(mode="json")["resilience"]["checkpointless"],
        "resilience.faults": {"injected": [fault, {**fault, "step": 4}], "random": None},
        "trainer.max_restarts": 0,
        "resources.shm_gib": 1,
    }
    begun = start_state(Job.model_validate(with_values(script_job(), values)), ["node-0"])
    ended = event("run_finished", 120.0, exit_status=0, reason="")
    words = " of the recipe did not fire, as no loop of resilience.protect met them\n"

    for before, told in (
        ([ended], f"faults      2{words}"),
        (
            [injected(110.0, "slow", 1), event("run_continued", 111.0), ended],
            f"faults      1{words}",
        ),
        ([injected(110.0, "slow", 1), injected(111.0, "slow", 1, step=4), ended], ""),
        ([event("run_started", 100.0)], ""),
    ):
        text = summary_text(reduce(next_state, before, begun), None) + "\n"
        assert told in text
        assert bool(told) == ("faults" in text)


def test_workers_that_begin_afresh_lose_the_steps_that_they_do_again() -> None:
    """The run has no recovery, so they say where they begin, and then nothing but their steps."""
    reason = "all workers began afresh: no recovery"
    events = [
        event("run_started", 100.0),
        *(step_event(number, 101.0 + number) for number in range(4)),
        died(105.0, 0),
        event("recovery_fallback", 108.0, 0, step=1, generation=1, reason=reason, source="s3"),
        *(step_event(number, 108.0 + number, generation=1) for number in range(1, 5)),
        event("run_finished", 120.0, exit_status=0, reason=""),
    ]

    (found,) = recoveries_of(events)

    assert (found.resumed_s, found.steps_lost) == (4.0, 3)
    assert dict(summary_rows(record_of(events)))["faults"] == (
        "1, 4.0 s lost, 20.0 % of the run, 3 steps lost"
    )


def test_generation_that_follows_a_fault_keeps_steps_and_workers() -> None:
    state = state_after([each for each in faulty_run() if each.time <= 109.2])

    assert (state.generation, state.num_steps, len(state.workers)) == (1, 3, 4)
    assert state.phase == "recovery"
    assert state_after(faulty_run()).num_steps == 8


def test_step_that_is_written_again_counts_once() -> None:
    events = [step_event(0, 1.0, duration_s=1.0), step_event(1, 2.0, duration_s=2.0)]

    state = state_after([*events, step_event(1, 3.0, duration_s=2.0, generation=1)])

    assert (state.num_steps, state.recent) == (2, ((0, 1.0), (1, 2.0)))


def test_display_shows_the_last_recovery() -> None:
    during = state_after([each for each in faulty_run() if each.time <= 109.2])
    after = state_after(faulty_run())

    assert "fault 1: rank 1: injected exception in forward, recovering" in drawn(during)
    assert render_recovery(after.recoveries[-1]) == (
        "fault 2: rank 2: died, recovered in 2.0 s; "
        "2 kept, 1 repaired from rank 1, 1 rolled forward; worker of rank 2 replaced"
    )
    assert "recovery (4 of 4 workers)" in render_line(during, 0.0)
    over = render_recovery(during.recoveries[-1], has_ended=True)
    assert over == "fault 1: rank 1: injected exception in forward, and no step came after it"
    ended = replace(during, exit_status=1)
    assert "injected exception in forward, and no step came after it" in drawn(ended)


def test_nodes_that_stand_by_and_nodes_that_are_lost_are_shown_as_such() -> None:
    nodes = ("node-0", "node-1", "node-2")
    events = [each for each in faulty_run() if each.time <= 105.0]
    lost = [*events, on_node("node_lost", 106.0, 0, node="node-1")]
    back = [*lost, on_node("node_joined", 107.0, 0, node="node-1")]

    assert state_after(events, nodes).node_phase("node-2") == "standing by"
    assert state_after(lost, nodes).node_phase("node-1") == "lost"
    assert state_after(back, nodes).node_phase("node-1") == "training"
    assert "node-2  standing by" in str(drawn(state_after(events, nodes)))
    assert render_state(state_after(events, nodes), 106.0)


def fault_lines(events: Sequence[Event]) -> list[str]:
    """Return what a console that is no terminal is told of faults, event by event."""
    file = StringIO()
    display = open_display(Console(file=file, width=40))
    for number in range(len(events)):
        display.show(state_after(events[: number + 1]), events[number].time)
    return [line for line in file.getvalue().splitlines() if ": fault " in line]


def test_console_says_that_all_nodes_were_lost_and_where_the_run_begins() -> None:
    lines = fault_lines(refounded_run())

    words = "all nodes lost, recovered in 10 s; 4 started; back to the checkpoint in the folder"
    assert lines == [f"{JOB.recipe.name}: fault 1: {words}: no rank holds state"]


def test_console_that_is_no_terminal_gets_a_line_for_each_recovery_once() -> None:
    lines = fault_lines(faulty_run())

    assert lines[0].startswith(
        "llama/llama3_tiny_checkpointless: fault 1: rank 1: injected exception in forward, "
    )
    assert ["fault 2" in line for line in lines] == [False, True]
