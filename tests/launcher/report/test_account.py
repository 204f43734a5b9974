"""Where a run's time went: right by hand, and every second of every rank in one part."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.job import Job
from launcher.report.account import PARTS, Account, account_of, account_text
from launcher.report.page import build_page, summary_rows
from launcher.report.record import build_record
from launcher.report.summary import summary_text
from resilience.events import Event, EventLog, read_events
from tests.launcher.command import launch, refuse
from tests.launcher.local_job import local_job
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


@functools.cache
def job() -> Job:
    return local_job("trainer.max_steps=4")


def account(events: Sequence[Event]) -> Account:
    return account_of(build_record(job(), events))


def of_a_rank(events: Sequence[Event]) -> dict[str, float]:
    """Return the seconds of a rank on average, without parts that have none."""
    found = account(events)
    seconds = {part: round(each / found.num_ranks, 9) for part, each in found.seconds.items()}
    return {part: each for part, each in seconds.items() if each}


@pytest.mark.parametrize(
    ("events", "found"),
    [
        pytest.param(
            whole_run(),
            {"start": 8.0, "training": 6.0, "checkpoint stall": 2.0, "stop": 4.0},
            id="without-a-fault",
        ),
        # An injected exception at 108.0, noticed at 108.1; a death that is noticed as it happens.
        pytest.param(
            faulty_run(),
            {"start": 4.0, "training": 9.0, "detection": 0.1, "teardown": 0.9, "repair": 3.0,
             "stop": 3.0},
            id="stages-of-recoveries",
        ),
        # No event tells of the fault; the generation's last event is step 3, at 108.
        pytest.param(
            refounded_run(),
            {"start": 4.0, "training": 2.0 + 3.0, "lost work": 2.0, "repair": 10.0, "stop": 1.0},
            id="time-in-which-all-nodes-were-lost",
        ),
    ],
)  # fmt: skip
def test_time_is_that_of_all_ranks(events: list[Event], found: dict[str, float]) -> None:
    assert of_a_rank(events) == found


def test_waits_of_the_rank_that_writes_the_steps_are_those_of_all() -> None:
    steps = [
        step_event(number, 109.0 + number, data_wait_s=0.25, blocked_s=0.5) for number in range(4)
    ]
    events = [*(each for each in whole_run() if each.event != "step"), *steps]

    assert of_a_rank(events) == {
        "start": 8.0,
        "training": 3.0,
        "data wait": 1.0,
        "checkpoint stall": 4.0,
        "stop": 4.0,
    }


def went_back() -> list[Event]:
    """Return a run that loses steps 3 and 4, and takes them again from a checkpoint of step 3."""
    return [
        event("run_started", 100.0),
        *all_ranks("worker_started", 101.0),
        *all_ranks("process_group_ready", 102.0),
        *all_ranks("model_ready", 104.0),
        *(step_event(number, 105.0 + number, data_wait_s=0.1) for number in range(5)),
        event("fault_detected", 110.0, 1, reason="died", text="killed by SIGKILL"),
        on_node("generation_broken", 110.0, 0, reason="killed by SIGKILL"),
        *recovery(110.0, 0, 3),
        *(
            step_event(number, 110.0 + number, generation=1, data_wait_s=0.1)
            for number in (3, 4, 5)
        ),
        *all_ranks("worker_finished", 116.0, generation=1),
        event("run_finished", 117.0, exit_status=0, reason="all nodes succeeded"),
    ]


def test_steps_that_were_taken_again_are_lost_work() -> None:
    assert of_a_rank(went_back()) == {
        "start": 4.0,
        # Steps 0 to 2, the unfinished one at the fault, and all behind the recovery.
        "training": 3.0 + 1.0 + 4.0 - 0.6,
        "data wait": 0.6,
        "lost work": 2.0,
        "teardown": 0.5,
        "repair": 1.5,
        "stop": 1.0,
    }


STEPS = [
    event("run_started", 100.0),
    *all_ranks("worker_started", 101.0),
    *all_ranks("model_ready", 102.0),
    *(step_event(number, 103.0 + number, duration_s=1.0) for number in range(3)),
]


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        pytest.param(
            [
                event("fault_detected", 305.0, 1, reason="died", text="Timed out"),
                event("run_finished", 306.0, exit_status=1, reason="failed"),
            ],
            {"start": 2.0, "training": 3.0, "detection": 200.0, "repair": 1.0},
            id="failed-after-waiting-in-vain",
        ),
        pytest.param(
            [event("run_finished", 306.0, exit_status=143, reason="stopped by SIGTERM")],
            {"start": 2.0, "training": 4.0, "standstill": 200.0},
            id="stopped-by-somebody",
        ),
        pytest.param(
            [
                step_event(3, 306.0, duration_s=201.0),
                event("run_finished", 306.0, exit_status=0, reason="done"),
            ],
            {"start": 2.0, "training": 4.0, "standstill": 200.0},
            id="went-on-by-itself",
        ),
        pytest.param(
            [
                event("checkpoint_started", 105.0, 0),
                event("checkpoint_written", 205.0, 0, path="x"),
                step_event(3, 306.0, duration_s=201.0, data_wait_s=99.0),
                event("run_finished", 306.0, exit_status=0, reason="done"),
            ],
            {"start": 2.0, "training": 5.0, "checkpoint stall": 100.0, "data wait": 99.0},
            id="waits-that-were-told",
        ),
        pytest.param(
            [
                step_event(3, 110.0, duration_s=4.9),
                event("run_finished", 110.0, exit_status=0, reason="done"),
            ],
            {"start": 2.0, "training": 8.0},
            id="slow-step",
        ),
    ],
)
def test_time_without_progress_is_no_training(rest: list[Event], found: dict[str, float]) -> None:
    """No recovery is there to notice it: a step takes one second, and then none comes."""
    assert of_a_rank([*STEPS, *rest]) == found


def test_rank_that_nothing_came_of_after_its_fault_was_being_repaired_to_the_end() -> None:
    events = [each for each in went_back() if each.time < 110.2]
    events += [event("run_finished", 130.0, exit_status=1, reason="gave up")]

    found = of_a_rank(events)

    assert found["repair"] == 20.0
    assert sum(found.values()) == 30.0


def resized() -> list[Event]:
    """Return a run that loses a node of two workers, and gets it back 6 s later."""
    pair = (2, 3)
    return [
        event("run_started", 100.0),
        on_node("generation_opened", 101.0, 0, world_size=4),
        *all_ranks("worker_started", 102.0),
        *all_ranks("model_ready", 104.0),
        *(step_event(number, 105.0 + number) for number in range(3)),
        on_node("node_lost", 108.0, 0, node="node-1"),
        event("fault_detected", 108.0, 2, reason="node lost", text="gone"),
        on_node("generation_broken", 108.0, 0, reason="gone"),
        *(event("rank_stopped", 108.2, rank) for rank in (0, 1)),
        on_node("generation_opened", 108.5, 1, world_size=2),
        *(event("rank_recovered", 108.7, rank, step=3, generation=1, role="kept")
          for rank in (0, 1)),
        *(event("rank_resumed", 109.0, rank, step=3, generation=1) for rank in (0, 1)),
        *(step_event(number, 106.0 + number, generation=1) for number in range(4, 7)),
        on_node("generation_left", 114.0, 1, reason="all ranks have left after step 6"),
        on_node("generation_opened", 114.5, 2, world_size=4),
        *(event("worker_started", 114.5, rank, generation=2) for rank in pair),
        *(event("rank_resumed", 115.0, rank, step=7, generation=2) for rank in range(4)),
        *all_ranks("worker_finished", 118.0, generation=2),
        event("run_finished", 120.0, exit_status=0, reason="all nodes succeeded"),
    ]  # fmt: skip


def test_run_that_became_smaller_lacks_the_ranks_that_it_was_without() -> None:
    record = build_record(job(), resized())

    found = account_of(record)

    assert [(each.num_workers, each.start_s, each.end_s) for each in record.sizes] == [
        (4, 1.0, 8.5), (2, 8.5, 14.5), (4, 14.5, 20.0)
    ]  # fmt: skip
    assert found.seconds["smaller"] == pytest.approx(2 * 6.0)
    assert found.total_s == pytest.approx(4 * 20.0)
    assert found.num_ranks == 4
    assert "<h2>Size</h2>" in build_page(record, [], b"packed")
    assert "<h2>Size</h2>" not in build_page(build_record(job(), faulty_run()), [], b"packed")


def test_what_a_start_lacks_goes_by_what_it_was_to_have() -> None:
    """The job is that of the last start, which is to have other sizes."""
    events = [
        replace(each, fields={"num_nodes": 2, "num_devices": 2})
        if each.event == "run_started"
        else each
        for each in resized()
    ]

    for num_nodes in (1, 2):
        own = local_job("trainer.max_steps=4", f"trainer.num_nodes={num_nodes}")
        found = account_of(build_record(own, events))
        assert found.seconds["smaller"] == pytest.approx(2 * 6.0)
        assert found.total_s == pytest.approx(4 * 20.0)


def test_rank_that_an_elastic_run_grows_by_was_not_being_started_before() -> None:
    """A fifth worker that the recipe does not ask for: it is missed by nobody."""
    events = [
        *(each for each in whole_run() if each.event != "run_finished"),
        on_node("generation_opened", 101.0, 0, world_size=4),
        on_node("generation_opened", 114.0, 1, world_size=5),
        event("worker_started", 114.5, 4, generation=1),
        event("run_finished", 120.0, exit_status=0, reason="all nodes succeeded"),
    ]

    found = account(events)

    assert found.seconds["smaller"] == 0.0
    assert found.num_ranks == 5
    assert found.seconds["start"] == pytest.approx(4 * 8.0 + 5.5)


_NAMES = ["process_group_ready", "data_ready", "model_ready", "rank_stopped", "rank_recovered",
          "rank_resumed", "checkpoint_started", "checkpoint_written", "worker_finished",
          "worker_failed", "worker_replaced", "worker_started", "fault_detected",
          "generation_broken", "generation_opened", "step"]  # fmt: skip
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(_NAMES), st.integers(1, 99), st.integers(0, 3), st.integers(0, 2),
        st.integers(0, 6),
    ),
    max_size=40,
)  # fmt: skip


@given(_EVENTS)
def test_every_second_of_every_rank_is_in_one_part(
    drawn: list[tuple[str, int, int, int, int]],
) -> None:
    events = [event("run_started", 0.0), *all_ranks("worker_started", 0.5)]
    for name, time, rank, generation, step in drawn:
        if name == "step":
            waits = {"data_wait_s": 0.3 * step, "blocked_s": 0.2 * rank}
            events.append(step_event(step, float(time), generation=generation, **waits))
        else:
            fields = {"reason": "died", "text": "x", "message": "x"}
            number = None if name.startswith("generation") else rank
            events.append(event(name, float(time), number, generation=generation, **fields))
    events.append(event("run_finished", 100.0, exit_status=0, reason="over"))

    found = account(events)

    assert found.num_ranks == 4
    assert tuple(found.seconds) == PARTS
    assert all(seconds >= -1e-9 for seconds in found.seconds.values())
    assert found.total_s == pytest.approx(4 * found.wall_s, abs=1e-6)


def write_run(folder: Path, events: Sequence[Event]) -> None:
    folder.mkdir()
    (folder / "job.json").write_text(job().to_json())
    for each in events:
        with EventLog(
            folder / "events.jsonl", node=each.node, rank=each.rank, generation=each.generation,
            clock=lambda now=each.time: now,
        ) as log:  # fmt: skip
            log.write(each.event, step=each.step, **each.fields)


def test_account_is_in_the_page_in_the_last_lines_and_for_programs(tmp_path: Path) -> None:
    record = build_record(job(), faulty_run())
    found = account_of(record)
    text = (
        "45.0 % training, 20.0 % start, 15.0 % repair, 15.0 % stop, 4.5 % teardown, 0.5 % detection"
    )
    write_run(tmp_path / "run", faulty_run())

    page = build_page(record, [], b"packed")
    told = json.loads(launch("report", "run", "--json", folder=tmp_path).out)

    assert account_text(found) == text
    assert f"  went to     {text}\n" in summary_text(record.state, Path("r.html"), found)
    assert "<tr><th>repair</th><td>3.0 s</td><td>15.0 %</td></tr>" in page
    assert told["seconds"] == pytest.approx(dict(found.seconds))
    assert told["goodput"] == pytest.approx(0.45)
    assert (told["num_ranks"], told["wall_s"], told["num_faults"]) == (4, 20.0, 2)
    assert not (tmp_path / "run/report.html").exists(), "nothing was asked for but the figures"


def test_folder_without_a_run_is_refused_for_programs_as_well(tmp_path: Path) -> None:
    assert "no run '.'" in refuse(tmp_path, "report", ".", "--json")


def test_report_takes_a_runs_name_and_names_an_option_that_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs/r1", faulty_run())

    by_name = launch("report", "r1", "--json", folder=tmp_path)

    assert by_name == launch("report", "runs/r1", "--json", folder=tmp_path)
    assert json.loads(by_name.out)["num_faults"] == 2
    assert "no run 'r2'; allowed: r1\n" in refuse(tmp_path, "report", "r2")
    message = "report has no option '--jsn'; allowed: --json\n"
    assert message in refuse(tmp_path, "report", "runs/r1", "--jsn")


def test_run_in_which_no_rank_came_to_begin_was_all_start() -> None:
    events = [event("run_started", 1.0), event("run_finished", 3.0, exit_status=2, reason="no")]

    found = account(events)

    assert (found.num_ranks, found.goodput, found.seconds["start"]) == (4, 0.0, 8.0)
    assert account_text(found) == "100.0 % start"


def test_run_of_which_nobody_has_told_anything_has_no_account_and_no_times() -> None:
    record = build_record(job(), [])

    assert account_text(account_of(record)) is None
    assert not {"begin", "end", "wall time"} & dict(summary_rows(record)).keys()


def later(events: Sequence[Event], by_s: float, *, start: int) -> list[Event]:
    """Return the events of another start of a run, which goes on after the first one's steps."""
    moved = [replace(each, time=each.time + by_s) for each in events]
    return [
        replace(
            each, step=each.step + 8, generation=each.generation + 3,
            fields={**each.fields, "start": start, "num_samples": 16 * (each.step + 9)},
        ) if each.event == "step" and each.step is not None
        else replace(each, generation=each.generation + 3)
        for each in moved
    ]  # fmt: skip


@pytest.mark.parametrize("between_s", [1.0, 86400.0])
def test_time_between_two_starts_is_nobodys(between_s: float) -> None:
    record = build_record(job(), [*faulty_run(), *later(faulty_run(), 20 + between_s, start=1)])
    rows = dict(summary_rows(record))
    found = account_of(record)

    assert found.wall_s == 40.0
    assert found.seconds == pytest.approx(
        {part: 2 * seconds for part, seconds in account(faulty_run()).seconds.items()}
    )
    assert [each.number for each in record.recoveries] == [1, 2, 3, 4]
    assert rows["faults"].startswith("4 (2 injected), 8.0 s lost, 20.0 % of the run")
    assert rows["wall time"].startswith("40 s in 2 starts, ")
    assert (record.start, record.end) == (100.0, 140.0 + between_s)
    last = "  wall time   20 s, 40 s with the starts before\n"
    assert last in summary_text(record.state, Path("r.html"), found)
    assert record.samples_per_second == build_record(job(), faulty_run()).samples_per_second


def test_starts_that_no_launcher_runs_begin_with_their_first_agent() -> None:
    """On Slurm and Kubernetes; an agent that comes back belongs to the start that it left."""

    def agent(time: float, start: str) -> Event:
        return on_node("agent_started", time, -1, start=start)

    own = [each for each in faulty_run() if each.node != "launcher"]
    second = later(own, 100.0, start=1)
    events = [
        agent(99.0, "7-0"), agent(99.2, "7-0"), *own, agent(112.0, "7-0"),
        on_node("gone", 120.0, 2),
        agent(199.0, "7-1"), *second, agent(200.0, "7-1"), on_node("gone", 220.0, 5),
    ]  # fmt: skip

    record = build_record(job(), events)

    assert [(each.begin_s, each.end_s) for each in record.starts] == [(0.0, 21.0), (100.0, 121.0)]
    wanted = account(faulty_run()).seconds
    assert account_of(record).seconds == pytest.approx(
        {part: 2 * wanted[part] + 8.0 * (part == "start") for part in PARTS}
    )


@pytest.mark.slow
def test_time_of_a_run_with_ten_faults_is_told_as_its_events_tell_it(tmp_path: Path) -> None:
    kinds = ["exception", "sigkill"] * 5
    faults = ",".join(
        f"{{kind:{kind},place:forward,step:{10 + 10 * number},rank:{number % 4}}}"
        for number, kind in enumerate(kinds)
    )
    words = ("recipe=llama/llama3_tiny_checkpointless", "trainer.max_steps=120", "run.dir=run")
    done = launch(
        *words, "action=run", f"resilience.faults.injected=[{faults}]", folder=tmp_path, env={}
    )
    assert done.status == 0, done.err

    told = json.loads(launch("report", "run", "--json", folder=tmp_path).out)

    events = read_events(tmp_path / "run/events.jsonl")
    injected = [each.time for each in events if each.event == "fault_injected"]
    resumed: dict[int, float] = {}
    for each in events:
        if each.event == "rank_resumed":
            resumed[each.generation] = each.time
    assert (len(injected), len(resumed)) == (10, 10)
    seconds = told["seconds"]
    assert sum(seconds.values()) == pytest.approx(told["wall_s"] * 4, rel=0.01)
    recoveries_s = sum(resumed.values()) - sum(injected)
    spent_s = seconds["detection"] + seconds["teardown"] + seconds["repair"]
    assert spent_s == pytest.approx(4 * recoveries_s, rel=0.01)
    steps = {
        each.step: each.fields
        for each in events
        # What a generation repeats of the one before has no duration.
        if each.event == "step" and each.fields["duration_s"] is not None
    }
    assert len(steps) == 120
    waited_s = sum(each["data_wait_s"] for each in steps.values())
    assert seconds["data wait"] == pytest.approx(4 * waited_s, rel=0.01)
    assert seconds["lost work"] == 0
    worked_s = sum(each["duration_s"] for each in steps.values()) - waited_s
    assert seconds["training"] == pytest.approx(4 * worked_s, rel=0.25)
