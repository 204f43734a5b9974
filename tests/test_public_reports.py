"""Public bug reports of similar systems, each with the tests that hold its symptom here.

A case is named after the thread. What can be shown in a few lines is shown here; what needs a run
is shown by the test that a table names. All of them were tried in November 2026: some symptoms were
not seen then, and those that were seen have been mended since.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.command import launch
from tests.launcher.local_world import prepare
from tests.launcher.real_runs import named
from tests.test_suite import find_test

HELD = """
verl 4873, KempnerForge 102: the newest checkpoint is announced before it is durable
    resilience/tiered/test_retention.py::test_all_small_histories_keep_exactly_what_they_should
    resilience/tiered/dcp/test_dcp.py::test_step_without_its_metadata_is_not_whole
pytorch 144657: an asynchronous save holds values of later steps
    scenarios/tiered/test_recovery.py::test_what_is_saved_through_faults_is_what_is_saved_without
    resilience/tiered/dcp/test_dcp.py::test_copy_that_changes_while_it_is_taken_is_not_loaded
torchtitan 3764: tied weights come apart
    recipes_training/torch/test_trainer_runs.py::test_tied_embeddings_stay_tied_when_sharded
torchtitan 3008: a packed sample is lost
    recipes_training/data/test_jsonl.py::test_documents_are_packed_with_an_end_token_after_each
    recipes_training/data/test_position.py::test_batches_that_change_leave_no_sample_out_and_repeat_none
miles 3187: all ranks draw the random numbers of rank 0
    resilience/state/test_rng.py::test_another_seed_step_or_micro_batch_draws_other_numbers
verl 7953, slime 1547: the learning rate after a resume is another one
    recipes_training/test_plan.py::test_schedule_spans_the_run_unless_told
    scenarios/tiered/test_continued.py::test_continued_run_has_the_bits_of_one_that_never_stopped
NVRx 348: an agent more than the run has nodes
    resilience/agent/coordination/test_coordinator.py::test_standby_takes_the_place_of_a_lost_node
    scenarios/agents/test_nodes.py::test_second_agent_of_a_name_is_refused
NVRx 383: the host of the rendezvous is lost
    scenarios/recovery/test_nodes.py::test_run_goes_on_without_a_lost_node
spd 741, spd 677: SIGTERM at any moment
    scenarios/elastic/test_resizing.py::test_a_worker_that_is_asked_before_its_first_step_leaves_after_it
    scenarios/elastic/test_resizing.py::test_a_signal_in_the_save_does_not_end_it
    scenarios/tiered/test_stop.py::test_all_workers_end_after_one_step_that_every_node_keeps
verl 7401, datasets 8308, torchtitan 3908: a resume, or a second one, repeats or loses samples
    recipes_training/data/test_order.py::test_each_epoch_has_every_sample_once
    recipes_training/data/test_position.py::test_batches_that_change_leave_no_sample_out_and_repeat_none
    recipes_training/data/test_position.py::test_ranks_divide_the_samples_from_the_position_on
accelerate 4071, 4233: the order is another one for other ranks, or the same in each epoch
    recipes_training/data/test_order.py::test_split_covers_each_position_of_a_step_once
    recipes_training/data/test_order.py::test_epochs_and_seeds_have_orders_of_their_own
Megatron-Bridge 3503: after a resume the data begin with their first sample again
    recipes_training/data/test_position.py::test_a_run_whose_batch_and_data_stay_counts_from_its_beginning
    scenarios/tiered/test_continued.py::test_continued_run_has_the_bits_of_one_that_never_stopped
NeMo-RL 2519: a resume with other data skips as many samples of them as the old ones gave
    recipes_training/data/test_position.py::test_other_data_begin_with_their_first_sample
    recipes_training/data/test_position.py::test_data_that_changed_under_the_same_name_are_refused
trainer 3737: a job that has failed for good is started again
    launcher/clusters/test_slurm_limit.py::test_job_that_ended_otherwise_is_not
    scenarios/k8s/test_growth.py::test_a_run_that_has_ended_is_not_scaled
hydra 1465, hydra 3227: a failed job of a sweep ends the others, or is in no log of its own
    test_public_reports.py::test_a_failed_job_of_a_sweep_is_in_its_own_log_and_ends_no_other
"""
"""Threads whose symptom was not seen here, what it was, and the tests that would see it."""
FAILED = """
mlc-llm 3494: weights of another architecture are taken, without their biases and activation
    recipes_training/weights/test_folder_other_models.py::test_a_key_that_no_job_has_and_that_changes_what_is_computed_is_refused
    recipes_training/weights/test_folder_other_models.py::test_a_tensor_that_the_model_does_not_have_is_refused
    recipes_training/convert/test_convert_refusals.py::test_a_tensor_that_the_model_does_not_have_is_refused
ms-swift 6049, Automodel 763, SimpleTuner 2986: a resumed run ends with other weights
    scenarios/tiered/test_continued.py::test_continued_run_has_the_bits_of_one_that_never_stopped
    launcher/commands/test_going_on.py::test_a_run_whose_workers_are_started_again_has_the_bits_of_one_that_was_not_disturbed
marin 7344: a standstill is silent, and counts as training
    launcher/commands/test_status.py::test_status_says_that_no_step_comes
    launcher/monitor/test_progress.py::test_standstill_is_told_when_it_begins_and_each_time_it_has_doubled
    launcher/report/test_account.py::test_time_without_progress_is_no_training
speculators 739: one damaged step hides those that are whole
    resilience/tiered/stores/test_reader.py::test_a_damaged_description_hides_no_other_step
    resilience/tiered/test_vault.py::test_one_bad_line_of_a_description_hides_no_other_shard
    launcher/commands/test_branching.py::test_what_a_run_has_gone_back_behind_is_no_state_of_it
    launcher/clusters/running/test_local_runs.py::test_store_is_looked_at_before_it_is_said_what_is_in_it
    recipes_training/convert/test_stored.py::test_what_a_run_has_not_is_told
buildkite 1129, skypilot 10527: texts become numbers and truth values on their way
    launcher/written/test_scalars.py::test_texts_of_recipes_and_groups_arrive_as_they_are_written
    launcher/written/test_scalars.py::test_a_frozen_recipe_has_the_same_texts_and_refuses_one_that_would_change
    launcher/written/test_overrides.py::test_a_variable_is_the_text_that_was_typed
    launcher/composition/test_recipe_file.py::test_a_file_that_is_no_recipe_is_named_with_what_it_lacks
Megatron-Bridge 2954: a configuration that cannot train is found on the nodes
    launcher/job/test_rules_of_megatron.py::test_what_does_not_divide_is_refused
    launcher/test_support.py::test_a_warm_up_that_is_longer_than_the_run_is_noted
dolma 176: a document that spells a special token gets that token
    recipes_training/data/test_jsonl.py::test_a_document_that_spells_a_special_token_is_text
    recipes_training/data/test_jsonl.py::test_half_of_a_surrogate_pair_is_named_where_a_tokenizer_takes_none
MFC 1771: a preempted job is never queued again, and nothing says so
    launcher/clusters/running/test_slurm_texts.py::test_what_the_controller_says
    launcher/commands/test_status.py::test_only_of_a_run_that_has_ended_status_says_what_it_left
no thread, hang: a hang that recovery finds counts as training
    resilience/agent/processes/test_hang.py::test_hang_began_with_the_last_progress_of_its_rank_and_is_told
    launcher/monitor/test_recoveries.py::test_fault_began_with_the_last_progress
no thread, layers: a step with more layers than the state is loaded into it
    resilience/tiered/test_saver.py::test_another_layout_is_refused_and_changes_nothing
    resilience/tiered/dcp/test_dcp_saves.py::test_what_no_rank_asks_for_is_an_error
    resilience/tiered/test_aws_reader.py::test_what_nobody_asks_for_is_an_error_but_for_those_who_say_so
no thread, cached: a loader that is resumed behind its end yields nothing
    resilience/data/test_datamodule.py::test_a_further_epoch_has_all_batches_again
    resilience/data/test_datamodule.py::test_a_position_behind_the_end_that_cannot_be_placed_is_an_error
no thread, twice: of a key that is given twice the last value is taken
    launcher/written/test_overrides.py::test_a_key_that_is_given_twice_is_refused
    launcher/composition/test_recipe_file.py::test_a_file_that_is_no_recipe_is_named_with_what_it_lacks
"""
"""Threads whose symptom was seen here, what it was, and the tests that see it."""


def _rows(table: str) -> list[tuple[str, list[str]]]:
    rows: list[tuple[str, list[str]]] = []
    for line in table.strip().splitlines():
        if line.startswith(" "):
            rows[-1][1].append(line.strip())
        else:
            rows.append((line.partition(":")[0], []))
    return rows


@pytest.mark.parametrize("names", [
    pytest.param(names, id=f"{group}-{threads}")
    for group, table in (("held", HELD), ("failed", FAILED))
    for threads, names in _rows(table)
])  # fmt: skip
def test_a_report_has_tests_that_would_see_it(names: list[str]) -> None:
    assert names
    assert [name for name in names if find_test(name) is None] == []


def test_a_failed_job_of_a_sweep_is_in_its_own_log_and_ends_no_other(tmp_path: Path) -> None:
    prepare(
        tmp_path,
        '#!/bin/sh\n{# job, node #}\nrun=$(dirname -- "$0")\necho "in ${run##*/}"\n'
        '[ "${run##*/}" != 0 ] || exit 7\n',
    )

    ended = launch("-m", "recipe=llama/llama3_tiny_pretrain", "trainer.seed=1,2", "action=run",
                   "run.dir=swept", folder=tmp_path)  # fmt: skip

    assert ended.status == 7, ended.err
    for number, status in (("0", 7), ("1", 0)):
        run = tmp_path / "swept" / number
        (finished,) = named(run, "run_finished")
        assert finished.fields["exit_status"] == status
        # A node that is ended with the one that failed may have written nothing.
        words = [path.read_text() for path in run.glob("logs/*.log")]
        assert set("".join(words).splitlines()) == {f"in {number}"}
