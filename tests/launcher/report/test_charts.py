"""The charts of the report: loss and time line, with what befell the run."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.report.charts import NUM_RANKS_MAX, loss_chart, thin, timeline_chart
from launcher.report.record import RunRecord, Step, build_record
from resilience.events import Event
from tests.launcher.run_events import event, faulty_run, on_node, step_event, tiered_run
from tests.launcher.shipped import shipped_job

JOB = shipped_job("llama/llama3_tiny_checkpointless", "local")


def record_of(events: Sequence[Event]) -> RunRecord:
    return build_record(JOB, events)


def test_loss_is_one_line_over_the_generations_with_each_step_once() -> None:
    line, *marks = loss_chart(record_of(faulty_run()))["data"]

    assert line["name"] == "generations 0 to 2"
    assert line["x"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert line["y"] == [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert [(mark["name"], mark["x"], mark["text"]) for mark in marks] == [
        ("injected fault", [3], ["fault 1: rank 1: injected exception in forward"]),
        ("fault", [5], ["fault 2: rank 2: died"]),
    ]


def test_loss_has_another_line_where_the_run_went_back() -> None:
    again = [step_event(number, 200.0 + number, generation=3) for number in range(2)]

    names = [trace["name"] for trace in loss_chart(record_of([*faulty_run(), *again]))["data"]]

    assert names[:2] == ["generations 0 to 2", "generation 3"]


def test_time_line_marks_faults_and_shows_who_recovers() -> None:
    record = record_of(faulty_run())
    layout = timeline_chart(record)["layout"]

    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(8.0, 8.0), (11.5, 11.5)]
    assert [mark["text"] for mark in layout["annotations"]] == ["1", "2"]
    assert [(span.phase, span.start_s, span.end_s) for span in record.spans if span.rank == 1] == [
        ("starting workers", 0.0, 1.0),
        ("process group", 1.0, 2.0),
        ("data", 2.0, 3.0),
        ("model", 3.0, 4.0),
        ("training", 4.0, 8.5),
        ("recovery", 8.5, 9.5),
        ("training", 9.5, 12.0),
        ("recovery", 12.0, 13.0),
        ("training", 13.0, 17.0),
        ("idle", 17.0, 20.0),
    ]


def test_time_line_shows_what_became_of_each_checkpoint_in_a_row_of_its_own() -> None:
    tiered, plain = (timeline_chart(record_of(events)) for events in (tiered_run(), faulty_run()))
    marks = [each for each in tiered["data"] if each["type"] == "scatter"]

    assert tiered["layout"]["yaxis"]["categoryarray"][0] == "checkpoints"
    assert [(each["name"], each["x"], each["text"]) for each in marks] == [
        ("checkpoint taken", [5.5, 7.5], [
            "checkpoint of step 1: 1.5 MB in 0.4 s on rank 0",
            "checkpoint of step 3: 2.0 MB in 0.5 s on rank 0",
        ]),
        ("checkpoint failed", [6.5], ["checkpoint of step 2 failed: no room"]),
        ("checkpoint loaded", [9.3], [(
            "step 3 loaded from own memory and memory of node-1: 8.0 MB in 0.25 s, "
            "bad copies left out: 1"
        )]),
    ]  # fmt: skip
    assert "checkpoints" not in plain["layout"]["yaxis"]["categoryarray"]
    assert "scatter" not in {each["type"] for each in plain["data"]}


def test_time_line_of_many_ranks_shows_those_that_failed() -> None:
    others = [event("worker_started", 101.0, rank, at="node-9") for rank in range(4, 128)]
    fault = event("fault_detected", 107.9, 127, at="node-9", reason="died", text="it was killed")
    events = sorted([*faulty_run(), *others, fault], key=lambda each: each.time)

    rows = timeline_chart(record_of(events))["layout"]["yaxis"]["categoryarray"]

    assert [row for row in rows if "rank 127" in row] == ["node-9 rank 127"]
    assert len([row for row in rows if "rank" in row]) == NUM_RANKS_MAX
    assert rows.index("node-9 rank 5") < rows.index("node-9 rank 127")


def test_time_line_of_a_replaced_worker_goes_on() -> None:
    events = [
        *(each for each in faulty_run() if each.time < 111.0),
        on_node("node_lost", 112.0, 1, node="node-1"),
        event("worker_started", 114.0, 2, at="node-2", generation=1),
        event("run_finished", 120.0, exit_status=0, reason=""),
    ]

    spans = [span for span in record_of(events).spans if span.rank == 2][-3:]

    assert [(span.node, span.phase, span.end_s) for span in spans] == [
        ("node-1", "training", 12.0),
        ("node-2", "starting workers", 14.0),
        ("node-2", "process group", 20.0),
    ]


def test_long_run_is_thinned_to_what_a_browser_can_draw() -> None:
    steps = [
        Step(generation=0, step=n, time_s=n, loss=1.0, duration_s=1.0, num_samples=n)
        for n in range(100_001)
    ]

    kept = thin(steps)

    assert len(kept) <= 5001
    assert (kept[0], kept[-1]) == (steps[0], steps[-1])
    assert thin([]) == []
