"""How far a run's store is, and whether it fails, as the run's events tell it."""

from __future__ import annotations

from functools import reduce

import pytest

from launcher.monitor.progress import render_line
from launcher.monitor.runstate import next_state, start_state
from launcher.monitor.storage import Storage, next_storage, storage_text
from launcher.report import summary_text
from launcher.report.page import summary_rows
from launcher.report.record import build_record
from resilience.events import Event
from tests.launcher.local_job import local_job
from tests.launcher.run_events import event, tiered_run


def told(name: str, time: float, node: str = "node-0", *, step: int | None = None) -> Event:
    fields = {"store": "s3:bucket", "text": "no such bucket"} if name == "store_failing" else {}
    return event(name, time, at=node, step=step, **fields)


STORED, FAILING = told("step_stored", 100.0, step=20), told("store_failing", 200.0)
ELSEWHERE = told("store_failing", 200.0, "node-1")
OF_20 = "in the store: step 20 of 30, 2 min 00 s ago"
FAILS = "for 20 s: no such bucket"


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], None),
        ([STORED], OF_20),
        ([STORED, told("step_stored", 180.0, "node-1", step=20)], OF_20),
        ([STORED, told("step_stored", 190.0, step=10)], OF_20),
        ([told("step_stored", 210.0, step=40)], "in the store: step 40 of 40, 10 s ago"),
        ([FAILING], f"in the store: no step of 30; the store fails on node-0 {FAILS}"),
        (
            [STORED, ELSEWHERE, told("store_failing", 210.0)],
            f"{OF_20}; the store fails on node-1 and 1 more {FAILS}",
        ),
        ([STORED, FAILING, told("store_well", 210.0)], OF_20),
    ],
)
def test_store_in_words(events: list[Event], text: str | None) -> None:
    known = reduce(next_storage, events, Storage())

    assert storage_text(known, 30, 220.0) == text


def test_a_step_that_was_stored_and_is_gone_is_told() -> None:
    events = [
        told("step_stored", 100.0, step=20),
        event("run_started", 200.0),
        loaded(300.0, 16, "ram"),
        loaded(301.0, 16, "ram"),
    ]

    state = reduce(next_state, events, start_state(local_job(), ["node-0"]))

    words = "the run goes on from step 16, and step 20 had been in the store"
    assert list(state.losses) == [words]
    assert f"  lost        {words}\n" in summary_text(state, None) + "\n"


@pytest.mark.parametrize("step", [20, 24])
def test_nothing_is_lost_where_a_run_goes_on_from_what_was_stored(step: int) -> None:
    events = [told("step_stored", 100.0, step=20), loaded(300.0, step, "s3")]

    assert reduce(next_state, events, start_state(local_job(), ["node-0"])).losses == {}


def test_progress_report_and_last_line_say_the_same() -> None:
    events = [*tiered_run(), told("step_stored", 107.9, step=2), told("store_failing", 107.95)]
    running = [each for each in events if each.time < 108.0]
    record = build_record(local_job("trainer.max_steps=4"), events)
    state = build_record(local_job("trainer.max_steps=4"), running).state

    words = "in the store: step 2 of {}, {}; the store fails on node-0 for {}: no such bucket"
    assert render_line(state, 117.9).endswith(words.format(3, "10 s ago", "10 s"))
    # What has ended is to have its last step there, whatever of it was saved.
    end = words.format(4, "12 s ago", "12 s")
    assert dict(summary_rows(record))["store"] == end.replace("ago", "before the end")
    assert summary_text(record.state, None).splitlines()[-1] == f"  store       {end}"


def loaded(time: float, step: int, source: str) -> Event:
    return event("checkpoint_loaded", time, 0, generation=1, step=step, source=source)


@pytest.mark.parametrize(
    ("step", "source", "text"),
    [
        (20, "folder", "in the store: step 20 of 20, 2 min 00 s ago"),
        (20, "ram", "in the store: step 20 of 20, 2 min 00 s ago"),
        (25, "ram+s3", "in the store: step 25 of 25, 10 s ago"),
        (25, "peer:b", "in the store: step 20 of 25, 2 min 00 s ago"),
        (5, "ram", None),
    ],
)
def test_what_a_run_went_back_behind_is_not_in_its_store(
    step: int, source: str, text: str | None
) -> None:
    events = [
        told("step_stored", 100.0, step=20),
        told("step_stored", 200.0, step=30),
        loaded(210.0, step, source),
    ]

    known = reduce(next_storage, events, Storage())

    assert storage_text(known, step, 220.0) == text
