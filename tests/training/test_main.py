from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.disks import make_full_file
from tests.training.jobs import GPT_OSS, MEGATRON, make_job, write_job
from tests.training.workers import ROOT, Outcome, run_torchrun, run_two_agents
from training.__main__ import choose_trainer
from training.errors import TrainingError
from training.stop import EXIT_STATUS


def _complaint(workers, folder, job, num_workers=1):
    outcome = workers.run(job, folder, num_workers=num_workers, is_success_expected=False)
    assert outcome.statuses == [1] * num_workers
    (failed,) = (each for each in outcome.named("worker_failed") if each.rank == 0)
    (line,) = outcome.log().splitlines()
    assert failed.fields["message"].endswith(line.removeprefix("training: "))
    return line


def _jsonl(path, **options):
    return {
        "data": {
            "kind": "jsonl",
            "seq_length": 4,
            "path": str(path),
            "text_key": "text",
            "tokenizer": "bytes",
            **options,
        }
    }


def _write_text(path, num_lines=50):
    path.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(num_lines)))
    return path


def test_torchrun_trains_a_job(tmp_path):
    job = make_job(
        model=GPT_OSS, trainer={"num_devices": 2}, **_jsonl(_write_text(tmp_path / "text.jsonl"))
    )

    run = run_torchrun(tmp_path / "run", job, num_workers=2)

    assert run.returncode == 0, run.stderr
    outcome = Outcome(tmp_path / "run", [0, 0])
    assert len(outcome.losses) == 4
    assert len(outcome.named("worker_finished")) == 2
    assert (tmp_path / "run/checkpoint/model.safetensors").exists()


def test_workers_that_torchrun_starts_again_meet_again(tmp_path):
    job = make_job(trainer={"num_devices": 2})

    run = run_torchrun(
        tmp_path, job, num_workers=2, module="tests.training.programs", max_restarts=1
    )

    assert run.returncode == 0, run.stderr
    outcome = Outcome(tmp_path, [0, 0])
    assert [each.generation for each in outcome.events if each.event == "step"] == [0] * 3 + [1] * 4
    assert {each.generation for each in outcome.named("worker_finished")} == {1}


@pytest.mark.slow
def test_workers_meet_again_when_only_one_agent_counts_a_restart(tmp_path):
    job = make_job(trainer={"num_nodes": 2, "num_devices": 1})

    statuses = run_two_agents(tmp_path, job, program="die_before_meeting", max_restarts=2)

    assert statuses == [0, 0]
    outcome = Outcome(tmp_path, statuses)
    assert {each.rank: each.generation for each in outcome.named("worker_finished")} == {0: 0, 1: 1}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_loop_starts_again_each_time_torchrun_restarts_a_killed_worker(tmp_path, number):
    job = make_job(trainer={"num_nodes": 2, "num_devices": 1, "max_steps": 8})

    statuses = run_two_agents(
        tmp_path,
        job,
        program="be_killed_once",
        max_restarts=2,
        TEST_RANK=str(number % 2),
        TEST_STEP=str(number * 7 % 8),
    )

    assert statuses == [0, 0]
    outcome = Outcome(tmp_path, statuses)
    assert (tmp_path / "killed").exists()
    assert len(outcome.named("worker_started")) == 4
    assert [each["step"] for each in outcome.steps][-8:] == list(range(8))
    assert len(outcome.named("checkpoint_written")) == 1


def test_gradients_that_are_not_finite_end_all_workers(workers, tmp_path):
    outcome = workers.run(
        make_job(trainer={"sharding": "hybrid", "num_replicas": 2, "num_devices": 4}),
        tmp_path,
        target="tests.training.programs:spoil_weights",
        is_success_expected=False,
    )

    assert outcome.statuses == [1] * 4
    for rank in range(4):
        (line,) = outcome.log(rank).splitlines()
        assert line.startswith("training: step 0: the gradient norm is nan; ranks 1 and 3 hold a ")
    assert not outcome.steps


def test_full_disk_is_one_line(workers, tmp_path):
    make_full_file(tmp_path / "events-node-0.jsonl")

    outcome = workers.run(make_job(), tmp_path, is_success_expected=False)

    assert outcome.statuses == [1]
    assert outcome.log() == (
        f"training: cannot write events to {tmp_path}/events-node-0.jsonl: "
        "No space left on device\n"
    )


def test_jsonl_is_tokenised_once_for_all_workers(workers, tmp_path):
    data = _jsonl(_write_text(tmp_path / "text.jsonl"))
    job = make_job(trainer={"num_devices": 2}, **data)

    two = workers.run(job, tmp_path / "two")
    one = workers.run(make_job(**data), tmp_path / "one")

    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert len(list((tmp_path / "two/cache").iterdir())) == 1
    assert len({each.fields["num_samples"] for each in two.named("data_ready")}) == 1


def test_missing_data_is_one_line(workers, tmp_path):
    line = _complaint(workers, tmp_path, make_job(**_jsonl("/nowhere/text.jsonl")))

    assert line == (
        "training: cannot read data.path /nowhere/text.jsonl: no such file or directory"
    )


def test_too_little_data_is_one_line(workers, tmp_path):
    line = _complaint(workers, tmp_path, make_job(data={"max_bytes": 100}))

    assert line == (
        "training: the data has 6 samples of 16 tokens and one step takes "
        "trainer.global_batch_size 8; give more text, or lower data.seq_length or "
        "trainer.global_batch_size"
    )


def test_too_small_vocabulary_is_one_line(workers, tmp_path):
    words = {**{f"word{number}": number for number in range(259)}, "<end>": 259}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(tmp_path / "words")
    text = _write_text(tmp_path / "text.jsonl")
    job = make_job(**_jsonl(text, tokenizer=str(tmp_path / "words")))

    line = _complaint(workers, tmp_path, job)

    assert line == (
        f"training: the tokenizer '{tmp_path}/words' has 260 tokens and model.vocab_size is 259; "
        "set model.vocab_size to at least 260"
    )


def test_worker_hears_what_its_node_leader_could_not_read(workers, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("{}\n")
    job = make_job(trainer={"num_devices": 2}, **_jsonl(path))

    outcome = workers.run(
        job, tmp_path, target="tests.training.programs:fail_late", is_success_expected=False
    )

    assert outcome.statuses == [1, 1]
    assert outcome.log(0) == outcome.log(1)
    assert "line 1 has no text under data.text_key 'text'" in outcome.log(1)


def test_other_world_size_is_one_line(workers, tmp_path):
    line = _complaint(workers, tmp_path, make_job(trainer={"num_devices": 4}))

    assert line == (
        "training: world size 1 is not the job's 4 (trainer.num_nodes 1 x trainer.num_devices 4); "
        "start as many workers as the job has"
    )


def test_megatron_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("training.__main__.find_spec", lambda name: None)

    with pytest.raises(TrainingError, match="needs Megatron-Core, which this Python does not have"):
        choose_trainer(make_job(trainer=MEGATRON))


def test_gpu_instance_without_gpu_is_one_line(workers, tmp_path):
    line = _complaint(workers, tmp_path, make_job(instance={"accelerator": "gpu"}))

    assert line.startswith("training: local rank 0 has no GPU, this node has 0; ")


def test_bug_keeps_its_traceback(workers, tmp_path):
    outcome = workers.run(
        make_job(),
        tmp_path,
        target="tests.training.programs:fail_on_model",
        is_success_expected=False,
    )

    assert outcome.statuses == [1]
    assert "Traceback (most recent call last)" in outcome.log()
    (failed,) = outcome.named("worker_failed")
    assert failed.fields["message"] == "ZeroDivisionError: a bug"


@pytest.mark.parametrize(
    ("program", "num_workers", "steps"),
    [
        pytest.param("stop_within_steps", 2, [0, 1, 2, 3, 4], id="all-after-the-same-step"),
        pytest.param("stop_in_checkpoint", 1, [0, 1, 2, 3, 4, 5, 6, 7], id="in-checkpoint"),
    ],
)
def test_sigterm_ends_the_run(workers, tmp_path, program, num_workers, steps):
    outcome = workers.run(
        make_job(trainer={"num_devices": num_workers, "max_steps": 8}),
        tmp_path,
        target=f"tests.training.programs:{program}",
        is_success_expected=False,
    )

    assert outcome.statuses == [EXIT_STATUS] * num_workers
    assert [each["step"] for each in outcome.steps] == steps
    assert [each.step for each in outcome.named("worker_stopped")] == [steps[-1]] * num_workers
    assert not outcome.named("worker_failed")
    assert not list(tmp_path.glob("checkpoint*"))


def test_sigterm_before_the_steps_ends_the_worker_at_once(workers, tmp_path):
    outcome = workers.run(
        make_job(),
        tmp_path,
        target="tests.training.programs:stop_before_steps",
        is_success_expected=False,
    )

    assert outcome.statuses == [EXIT_STATUS]
    assert [each.step for each in outcome.named("worker_stopped")] == [None]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param(None, "training: cannot read the job ", id="missing"),
        pytest.param("{}", "job.json is no job of this version: recipe: ", id="invalid"),
        pytest.param(
            "{", "job.json is no job of this version: the whole file: Invalid JSON", id="torn"
        ),
    ],
)
def test_bad_job_is_one_line_without_waiting_for_torch(tmp_path, text, complaint):
    if text:
        (tmp_path / "job.json").write_text(text)
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }

    run = _run_main(tmp_path, variables)

    assert run.returncode == 1
    assert complaint in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_worker_that_is_told_only_a_part_says_in_one_line_what_is_missing(tmp_path):
    run = _run_main(tmp_path, {"WORLD_SIZE": "2"})

    assert run.returncode == 1
    assert run.stderr == "training: the variable RANK is not set; start workers with torchrun\n"


def test_process_that_is_told_nothing_is_the_whole_world(tmp_path):
    write_job(tmp_path, make_job())

    run = _run_main(tmp_path, {})

    assert run.returncode == 0, run.stderr
    outcome = Outcome(tmp_path, [0])
    assert len(outcome.losses) == 4
    assert outcome.weights()


def test_process_that_is_alone_cannot_run_the_job_of_two(tmp_path):
    write_job(tmp_path, make_job(trainer={"num_devices": 2}))

    run = _run_main(tmp_path, {})

    assert run.returncode == 1
    assert run.stderr.startswith("training: world size 1 is not the job's 2 ")
    assert len(run.stderr.splitlines()) == 1


def _run_main(folder, variables):
    options = [f"--job={folder}/job.json", f"--run-dir={folder}", "--node-name=node-0"]
    return subprocess.run(
        [sys.executable, "-m", "training", *options],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
