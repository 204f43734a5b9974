from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from recipes_training.__main__ import choose_trainer
from recipes_training.errors import TrainingError
from recipes_training.stop import EXIT_STATUS
from tests.disks import make_full_file
from tests.recipes_training.jobs import MEGATRON, make_job, write_job
from tests.recipes_training.workers import ROOT, Outcome, rank_variables, run_torchrun


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


def test_workers_that_torchrun_starts_again_meet_again(tmp_path):
    job = make_job(trainer={"num_devices": 2})

    run = run_torchrun(
        tmp_path, job, num_workers=2, module="tests.recipes_training.programs", max_restarts=1
    )

    assert run.returncode == 0, run.stderr
    outcome = Outcome(tmp_path, [0, 0])
    assert [each.generation for each in outcome.events if each.event == "step"] == [0] * 3 + [1] * 4
    assert {each.generation for each in outcome.named("worker_finished")} == {1}


def test_full_disk_is_one_line(workers, tmp_path):
    make_full_file(tmp_path / "events-node-0.jsonl")

    outcome = workers.run(make_job(), tmp_path, is_success_expected=False)

    assert outcome.statuses == [1]
    assert outcome.log() == (
        f"recipes_training: cannot write events to {tmp_path}/events-node-0.jsonl: "
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


def test_worker_hears_what_its_node_leader_could_not_read(workers, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("{}\n")
    job = make_job(trainer={"num_devices": 2}, **_jsonl(path))

    outcome = workers.run(
        job, tmp_path, target="tests.recipes_training.programs:fail_late", is_success_expected=False
    )

    assert outcome.statuses == [1, 1]
    assert outcome.log(0) == outcome.log(1)
    assert "line 1 has no text under data.text_key 'text'" in outcome.log(1)


def test_other_world_size_is_one_line(workers, tmp_path):
    job = make_job(trainer={"num_devices": 4})

    outcome = workers.run(job, tmp_path, num_workers=1, is_success_expected=False)

    told = (
        "world size 1 is not the job's 4 (trainer.num_nodes 1 x trainer.num_devices 4); "
        "start as many workers as the job has"
    )
    assert outcome.statuses == [1]
    assert outcome.log() == f"recipes_training: {told}\n"
    (failed,) = outcome.named("worker_failed")
    assert failed.fields["message"].endswith(told)


def test_megatron_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr("recipes_training.__main__.find_spec", lambda name: None)

    with pytest.raises(TrainingError, match="needs Megatron-Core, which this Python does not have"):
        choose_trainer(make_job(trainer=MEGATRON))


def test_bug_keeps_its_traceback(workers, tmp_path):
    outcome = workers.run(
        make_job(),
        tmp_path,
        target="tests.recipes_training.programs:fail_on_model",
        is_success_expected=False,
    )

    assert outcome.statuses == [1]
    assert "Traceback (most recent call last)" in outcome.log()
    (failed,) = outcome.named("worker_failed")
    assert failed.fields["message"] == "ZeroDivisionError: a bug"


@pytest.mark.parametrize(
    ("program", "num_workers", "steps"),
    [
        pytest.param("stop_before_steps", 1, [], id="before-the-steps"),
        pytest.param("stop_within_steps", 2, [0, 1, 2, 3, 4], id="all-after-the-same-step"),
        pytest.param("stop_in_checkpoint", 1, [0, 1, 2, 3, 4, 5, 6, 7], id="in-checkpoint"),
    ],
)
def test_sigterm_ends_the_run(workers, tmp_path, program, num_workers, steps):
    outcome = workers.run(
        make_job(trainer={"num_devices": num_workers, "max_steps": 8}),
        tmp_path,
        target=f"tests.recipes_training.programs:{program}",
        is_success_expected=False,
    )

    assert outcome.statuses == [EXIT_STATUS] * num_workers
    assert [each["step"] for each in outcome.steps] == steps
    last = steps[-1] if steps else None
    assert [each.step for each in outcome.named("worker_stopped")] == [last] * num_workers
    assert not outcome.named("worker_failed")
    assert not list(tmp_path.glob("checkpoint*"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param(None, "recipes_training: cannot read the job ", id="missing"),
        pytest.param("{}", "job.json is no job of this version: recipe: ", id="invalid"),
    ],
)
def test_bad_job_is_one_line_without_waiting_for_torch(tmp_path, text, complaint):
    if text:
        (tmp_path / "job.json").write_text(text)

    run = _run_main(tmp_path, rank_variables(0, 1, 1))

    assert run.returncode == 1
    assert complaint in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_process_that_is_told_nothing_is_the_whole_world(tmp_path):
    write_job(tmp_path, make_job())

    run = _run_main(tmp_path, {})

    assert run.returncode == 0, run.stderr
    outcome = Outcome(tmp_path, [0])
    assert len(outcome.losses) == 4
    assert outcome.weights()


def _run_main(folder, variables):
    options = [f"--job={folder}/job.json", f"--run-dir={folder}", "--node-name=node-0"]
    return subprocess.run(
        [sys.executable, "-m", "recipes_training", *options],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
