"""Public bug reports of similar systems, each with the tests that hold its symptom here.

A case is named after the thread. What can be shown in a few lines is shown here; what needs a run
is shown by the test that the table names.
"""

from __future__ import annotations

from itertools import chain

import pytest

from tests.test_suite import find_test
from training.data.order import SampleOrder, Split

REPORTS = """
verl 4873, KempnerForge 102: the newest checkpoint is announced before it is durable
    resilience/tiered/test_keeper.py::test_a_step_goes_only_when_a_newer_one_is_complete
    resilience/tiered/test_dcp.py::test_step_without_its_metadata_is_not_whole
pytorch 144657: an asynchronous save holds values of later steps
    training/tiered/test_recovery.py::test_what_is_saved_through_faults_is_what_is_saved_without
    resilience/tiered/test_dcp.py::test_copy_that_changes_while_it_is_taken_is_not_loaded
torchtitan 3764: tied weights come apart
    training/torch/test_run.py::test_tied_embeddings_stay_tied_when_sharded
torchtitan 3008: a packed sample is lost
    training/data/test_jsonl.py::test_documents_are_packed_with_an_end_token_after_each
    training/data/test_position.py::test_batches_that_change_leave_no_sample_out_and_repeat_none
miles 3187: all ranks draw the random numbers of rank 0
    resilience/state/test_rng.py::test_another_seed_step_or_micro_batch_draws_other_numbers
verl 7953, slime 1547: the learning rate after a resume is another one
    training/test_plan.py::test_schedule_spans_the_run_unless_told
    launcher/running/test_continue.py::test_a_run_that_was_stopped_and_goes_on_has_the_bits_of_one_that_was_not
NVRx 348: an agent more than the run has nodes
    resilience/agent/test_coordinator.py::test_standby_may_come_later
    resilience/agent/test_nodes.py::test_second_agent_of_a_name_is_refused
NVRx 383: the host of the rendezvous is lost
    training/recovery/test_nodes.py::test_run_goes_on_without_a_lost_node
spd 741, spd 677: SIGTERM at any moment
    training/tiered/test_resizing.py::test_a_worker_that_is_asked_before_its_first_step_leaves_after_it
    training/tiered/test_resizing.py::test_a_signal_in_the_save_does_not_end_it
    training/tiered/test_stop.py::test_all_workers_end_after_one_step_that_every_node_keeps
"""
"""Threads, what went wrong there, and the tests here that would see it."""


def _rows() -> list[tuple[str, list[str]]]:
    rows: list[tuple[str, list[str]]] = []
    for line in REPORTS.strip().splitlines():
        if line.startswith(" "):
            rows[-1][1].append(line.strip())
        else:
            rows.append((line.partition(":")[0], []))
    return rows


@pytest.mark.parametrize("names", [pytest.param(each, id=threads) for threads, each in _rows()])
def test_a_report_has_tests_that_would_see_it(names: list[str]) -> None:
    assert names
    assert [name for name in names if find_test(name) is None] == []


NUM_SAMPLES, BATCH, NUM_STEPS = 22, 4, 14


def _trained(
    *, world_size: int = 1, first_step: int = 0, first_sample: int = 0, last_step: int = NUM_STEPS
) -> list[list[int]]:
    """Return the samples of each step, in the order in which all ranks together have them."""
    order = SampleOrder(num_samples=NUM_SAMPLES, seed=7)
    split = Split(
        global_batch_size=BATCH,
        micro_batch_size=1,
        world_size=world_size,
        first_step=first_step,
        first_sample=first_sample,
    )
    return [
        [
            order.sample_at(position)
            for rank in range(world_size)
            for micro_batch in split.micro_batches(rank)
            for position in split.positions(step=step, micro_batch=micro_batch)
        ]
        for step in range(first_step, last_step)
    ]


@pytest.mark.parametrize("step", range(NUM_STEPS), ids=lambda step: f"verl-7401-stop-before-{step}")
def test_a_resume_at_or_beside_the_end_of_an_epoch_repeats_and_loses_no_sample(step: int) -> None:
    whole = _trained()

    resumed = _trained(first_step=step, first_sample=step * BATCH)

    assert whole[:step] + resumed == whole
    assert sorted(list(chain(*whole))[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(3, 4, id="datasets-8308"),
        pytest.param(5, 6, id="torchtitan-3908-within-an-epoch"),
        pytest.param(5, 11, id="torchtitan-3908-beyond-it"),
    ],
)
def test_a_second_resume_goes_on_where_the_first_ended(first: int, second: int) -> None:
    parts = [
        _trained(last_step=first),
        _trained(first_step=first, first_sample=first * BATCH, last_step=second),
        _trained(first_step=second, first_sample=second * BATCH),
    ]

    assert list(chain(*parts)) == _trained()


@pytest.mark.parametrize("world_size", [2, 4], ids=lambda size: f"accelerate-4071-{size}-ranks")
def test_the_order_of_samples_is_the_same_for_any_number_of_ranks(world_size: int) -> None:
    assert _trained(world_size=world_size) == _trained()


def test_accelerate_4233_another_epoch_has_another_order_of_the_same_samples() -> None:
    order = SampleOrder(num_samples=NUM_SAMPLES, seed=7)

    first, second = (
        [order.sample_at(epoch * NUM_SAMPLES + index) for index in range(NUM_SAMPLES)]
        for epoch in range(2)
    )

    assert sorted(first) == sorted(second)
    assert first != second
