"""What a run's tiers did, as its events tell it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import pytest

from launcher.monitor.checkpoints import (
    Checkpoint,
    checkpoints_text,
    missed_text,
    newest_saved,
    next_checkpoints,
    source_text,
)
from launcher.monitor.progress import render_line
from launcher.report import summary_text
from launcher.report.page import summary_rows
from launcher.report.record import RunRecord, build_record
from resilience.events import Event
from tests.launcher.local_job import local_job
from tests.launcher.run_events import all_ranks, event, on_node, step_event, tiered_run, whole_run

TEXT = (
    "2 checkpoints, newest of step 3 (2.0 MB on rank 0), 1 failed, "
    "loaded step 3 from own memory and memory of node-1"
)


def record_of(events: Sequence[Event]) -> RunRecord:
    return build_record(local_job("trainer.max_steps=4"), events)


def checkpoints_of(events: Sequence[Event]) -> tuple[Checkpoint, ...]:
    return reduce(next_checkpoints, events, ())


def test_summary_says_how_many_and_the_newest() -> None:
    record = record_of(tiered_run())

    assert dict(summary_rows(record))["tiers"] == TEXT
    assert f"  tiers       {TEXT}\n" in summary_text(record.state, None)
    assert "tiers" not in summary_text(record_of(whole_run()).state, None)


def test_progress_names_the_newest() -> None:
    running = [each for each in tiered_run() if each.time < 108.0]

    assert render_line(record_of(running).state, 108.0).endswith(", checkpoint of step 3")


def test_fallback_names_the_tier() -> None:
    (recovery,) = record_of(tiered_run()).recoveries

    assert (
        recovery.fallback == "back to the checkpoint in own memory and memory of node-1: no replica"
    )


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        (["ram"], "own memory"),
        (["peer:b", "peer:a"], "memory of a, b"),
        ([f"peer:{number}" for number in range(9)], "memory of 9 other nodes"),
        (["s3"], "S3"),
        (["folder", "ram"], "own memory and the folder"),
        ([], "a checkpoint"),
    ],
)
def test_sources_in_words(sources: list[str], text: str) -> None:
    assert source_text(sources) == text


def test_what_means_nothing_changes_nothing() -> None:
    assert checkpoints_of([*whole_run(), event("checkpoint_saved", 1.0, 0)]) == ()
    assert checkpoints_text(()) is None
    odd = event("checkpoint_saved", 1.0, 0, step=1, num_bytes="many", seconds="NaN")
    assert checkpoints_of([odd])[0].what == "checkpoint of step 1: 0.0 MB in 0 s on rank 0"


def test_ranks_that_say_the_same_are_one_whatever_is_said_between() -> None:
    said = [
        event("checkpoint_failed", 1.0, 0, step=2, reason="no room"),
        event("checkpoint_saved", 1.1, 0, step=3),
        event("checkpoint_failed", 1.2, 1, step=2, reason="no room"),
    ]

    assert checkpoints_text(checkpoints_of(said)) == (
        "1 checkpoint, newest of step 3 (0.0 MB on rank 0), 1 failed"
    )
    assert len(checkpoints_of(said)) == 2


def test_a_load_after_another_fault_counts_again() -> None:
    loads = [
        event("checkpoint_loaded", time, rank, step=3, generation=generation, source="s3")
        for time, generation in ((1.0, 1), (9.0, 2))
        for rank in range(4)
    ]

    text = checkpoints_text(checkpoints_of(loads))
    assert text == "0 checkpoints, 2 loaded, last step 3 from S3"


def test_what_a_service_left_undone_stands_in_the_summary() -> None:
    text = "did not end in time, and was killed"
    lost = on_node("service_lost", 113.0, 1, service="memoryd", text=text)
    record = record_of([*tiered_run(), lost])

    assert dict(summary_rows(record))["lost"] == f"memoryd of node-0 {text}"
    assert f"\n  lost        memoryd of node-0 {text}" in summary_text(record.state, None)
    assert "\n  lost " not in summary_text(record_of(tiered_run()).state, None)


def test_a_state_that_nodes_have_saved_without_a_generation_is_the_newest_checkpoint() -> None:
    saved = on_node("state_saved", 113.0, 1, saved_step=9, place="the tiers")

    known = checkpoints_of([*tiered_run(), saved])

    assert known[-1].what == "state of step 9 saved to the tiers"
    assert "newest of step 9 (the tiers), " in f"{checkpoints_text(known)}"


def test_a_step_that_a_rank_could_not_save_is_no_checkpoint() -> None:
    failed = event("checkpoint_failed", 107.6, 2, step=3, reason="no daemon")

    text = checkpoints_text(checkpoints_of([*tiered_run(), failed]))

    assert text is not None
    assert text.startswith("1 checkpoint, newest of step 1 (1.5 MB on rank 0), 2 failed, ")


OF_10, OF_20, OF_30 = ("saved", 1, 10), ("failed", 2, 20), ("failed", 3, 30)
TWO = "2 failed, the last: no daemon"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([OF_10, OF_20], None),
        ([OF_10, OF_20, OF_30], f"no checkpoint since that of step 10, 1 min 40 s ago: {TWO}"),
        ([OF_20, ("failed", 2.1, 20)], None),  # two ranks, one step
        ([OF_20, OF_30], f"no checkpoint yet: {TWO}"),
        ([OF_20, OF_30, ("saved", 4, 40)], None),
        ([OF_10, OF_20, OF_30, ("loaded", 4, 10)], None),
    ],
)
def test_from_the_second_missed_checkpoint_on_it_is_said(
    said: list[tuple[str, float, int]], text: str | None
) -> None:
    known = checkpoints_of(
        [
            event(f"checkpoint_{kind}", time, 0, step=step, reason="no daemon", source="ram")
            for kind, time, step in said
        ]
    )

    assert missed_text(known, 101.0) == text
    whole = checkpoints_text(known)
    assert whole is not None
    assert ("no checkpoint " in whole) == (text is not None)


def test_a_step_that_cannot_be_loaded_is_none_to_go_on_from() -> None:
    said = [
        event("checkpoint_saved", 1.0, 0, step=10),
        event("checkpoint_saved", 2.0, 0, step=20),
        *all_ranks("checkpoint_unreadable", 3.0, step=20, generation=1, reason="torn"),
        *all_ranks("checkpoint_loaded", 4.0, step=10, generation=1, source="folder"),
    ]

    known = checkpoints_of(said)
    later = checkpoints_of([*said, event("checkpoint_saved", 5.0, 0, step=15, generation=1)])

    assert (newest_saved(known), newest_saved(later)) == (known[0], later[-1])
    assert known[2].what == "step 20 cannot be loaded: torn"
    text = checkpoints_text(known)
    assert text is not None
    assert text.startswith("2 checkpoints, newest of step 10 (0.0 MB on rank 0), step 20 could not")


def test_first_loss_is_that_of_the_first_step_however_often_a_run_was_started() -> None:
    again = [
        event("run_started", 200.0),
        *all_ranks("worker_started", 201.0, generation=1),
        step_event(4, 202.0, 0.5, generation=1),
    ]

    state = record_of([*whole_run(), *again]).state
    anew = record_of([*whole_run(), *again[:-1], step_event(0, 202.0, 3.5, generation=1)]).state

    assert (state.first_loss, state.loss) == (4.0, 0.5)
    assert (anew.first_loss, anew.loss) == (3.5, 3.5)
