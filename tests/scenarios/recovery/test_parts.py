"""Faults where a run has more to it than the matrix: models, data, micro batches, its end."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.cases import slow
from tests.recipes_training.jobs import GPT_OSS
from tests.scenarios.recovery.runs import (
    check_same,
    check_same_bits,
    finish,
    make_fault_job,
    run_job,
    start_run,
)
from tests.scenarios.tiered.runs import make_tiered_job, start_nodes, tiered

NUM_STEPS = 24
PROGRAMS = "tests.scenarios.recovery.programs"
FAULTS = [
    {"kind": "sigkill", "place": "reduction", "step": 2, "rank": 1},
    {"kind": "exception", "place": "backward", "step": 5, "rank": 0},
    {"kind": "sigkill", "place": "within_update", "step": 8, "rank": 2},
    {"kind": "corrupt", "place": "gate", "step": 11, "rank": 3, "tensor": "moment"},
    {"kind": "exit", "place": "forward", "step": 14, "rank": 0},
    {"kind": "exception", "place": "before_update", "step": 17, "rank": 1},
    {"kind": "sigkill", "place": "data", "step": 20, "rank": 0},
]


def check_part(folder, undisturbed, trainer, **parts):
    outcome = run_job(folder, make_fault_job(trainer, max_steps=NUM_STEPS, faults=FAULTS, **parts))

    check_same(outcome, undisturbed(trainer, max_steps=NUM_STEPS, **parts), faults=FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "hybrid"])
def test_faults_in_the_first_and_last_of_several_micro_batches(tmp_path, undisturbed, trainer):
    check_part(tmp_path, undisturbed, trainer, values={"global_batch_size": 24})


@pytest.mark.slow
def test_model_with_experts(tmp_path, undisturbed):
    check_part(tmp_path, undisturbed, "hybrid", model=GPT_OSS)


@pytest.mark.slow
def test_activations_that_are_computed_again(tmp_path, undisturbed):
    check_part(tmp_path, undisturbed, "hybrid", values={"activation_checkpointing": True})


def read_as_words(path):
    """Return the data of a file, and make their tokenizer beside it."""
    words = {word: number for number, word in enumerate(("hello", "world", "<unk>", "<end>"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = path.parent / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(folder)
    return {
        "kind": "jsonl",
        "seq_length": 16,
        "path": str(path),
        "text_key": "text",
        "tokenizer": str(folder),
    }


def test_worker_that_takes_over_opens_tokenised_data_alone(tmp_path, undisturbed):
    lines = [
        json.dumps({"text": " ".join(("hello", "world")[n >> bit & 1] for bit in range(9))})
        for n in range(300)
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")

    data = read_as_words(tmp_path / "text.jsonl")
    check_part(tmp_path / "run", undisturbed, "ddp", data=data)


@pytest.mark.parametrize("trainer", ["ddp", slow("hybrid")])
@pytest.mark.parametrize(
    ("program", "num_deaths"), [slow("die_while_writing", 1), ("die_while_waiting", 2)]
)
def test_death_while_the_checkpoint_is_written(tmp_path, undisturbed, trainer, program, num_deaths):
    job = make_fault_job(trainer, max_steps=6)

    outcome = run_job(
        tmp_path, job, module=PROGRAMS, TEST_PROGRAM=program, TEST_MARKERS=str(tmp_path)
    )

    check_same(outcome, undisturbed(trainer, max_steps=6))
    assert len(outcome.named("worker_replaced")) == num_deaths
    assert outcome.named("checkpoint_written")


def test_death_after_the_model_is_written_changes_nothing(tmp_path, undisturbed):
    job = make_fault_job(max_steps=6)

    outcome = run_job(
        tmp_path,
        job,
        module=PROGRAMS,
        TEST_PROGRAM="die_after_the_end",
        TEST_MARKERS=str(tmp_path),
    )

    check_same(outcome, undisturbed("ddp", max_steps=6))
    assert len(outcome.named("worker_finished")) == 3
    assert not outcome.named("worker_replaced")


@pytest.mark.parametrize("trainer", ["ddp", slow("hybrid")])
@pytest.mark.parametrize("kind", [None, slow("exception"), slow("sigkill")])
def test_workers_that_are_asked_to_stop_end_after_the_same_step(tmp_path, trainer, kind):
    """Also where a fault comes at the same moment."""
    faults = [{"kind": kind, "place": "gate", "step": 5, "rank": 1}] if kind else []
    job = make_fault_job(trainer, max_steps=400, faults=faults)

    with start_run(tmp_path, job) as run:
        if kind:
            run.wait_for(lambda event: event.event == "generation_broken")
        else:
            run.wait_for_step(5)
        run.agents["n0"].send_signal(signal.SIGTERM)
        outcome = finish(run)

    assert outcome.statuses == [128 + signal.SIGTERM], run.log()
    stopped = {each.rank: each.step for each in outcome.named("worker_stopped") if each.step}
    # Nobody is replaced any more: while a worker is missing no further step can be ended.
    assert sorted(stopped) == [0, 1, 2, 3] or (kind == "sigkill" and not stopped)
    assert len(set(stopped.values())) <= 1
    assert max(outcome.bits()) == stopped.get(0, max(outcome.bits())) < 399
    assert not outcome.named("worker_failed")
    assert not outcome.left_behind


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "hybrid"])
def test_run_without_self_checks_or_spares(tmp_path, undisturbed, trainer):
    faults = [each for each in FAULTS if each["kind"] != "corrupt"]
    job = make_fault_job(
        trainer,
        max_steps=NUM_STEPS,
        faults=faults,
        settings={"self_check_every_n_steps": None, "spares_per_node": 0},
    )

    outcome = run_job(tmp_path, job)

    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS))
    assert len(outcome.named("fault_injected")) == len(faults)


@pytest.mark.parametrize("trainer", ["ddp", slow("hybrid")])
def test_run_that_gives_up_saves_its_state_and_says_where(tmp_path, undisturbed, trainer):
    job = make_tiered_job(
        trainer,
        tiers=tiered(every_n_steps=5),
        max_steps=6,
        settings={"restarts_without_progress_max": 1},
    )
    with start_nodes(tmp_path / "nodes") as nodes:
        daemon = nodes.variables("n0")
        program = {"TEST_PROGRAM": "die_in_forward", "TEST_MARKERS": os.devnull, **daemon}
        with start_run(tmp_path / "run", job, module=PROGRAMS, **program) as run:
            given_up = finish(run)
        last = run.log().splitlines()[-1]
        first_events = given_up.events
        (generation,) = {each.generation for each in given_up.named("giving_up")}

        with start_run(tmp_path / "run", job, **daemon) as run:
            outcome = finish(run)

    assert given_up.statuses == [75]
    assert "the run ends with exit status 75: 2 faults without a committed step" in last
    assert "the state of step 3 is saved in the nodes' memory, namespace run-" in last
    assert max(each.generation for each in first_events) == generation
    assert not given_up.left_behind
    assert outcome.statuses == [0]
    assert {each.step for each in outcome.named("recovery_fallback")} == {3}
    check_same_bits(outcome, undisturbed(trainer, max_steps=6))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        pytest.param("data", "cannot read data.path", id="data"),
        pytest.param("model", "model.weights", id="weights"),
    ],
)
def test_data_and_weights_that_are_not_there_end_the_run_at_once(tmp_path, part, words):
    """They would not be there in the next generation."""
    missing = tmp_path / "missing"
    value = read_as_words(missing) if part == "data" else {"weights": str(missing)}

    job = make_fault_job(max_steps=6, num_devices=2, **{part: value})
    outcome = run_job(tmp_path / "run", job)

    log = (tmp_path / "run" / "agent-n0.log").read_text()
    assert outcome.statuses == [1], log
    (last,) = [line for line in log.splitlines() if "the run ends with" in line]
    assert f"{words} {missing}" in last
    # Weights are looked for before there is one.
    assert len(outcome.named("generation_opened")) == (part == "data")
    assert not outcome.left_behind
