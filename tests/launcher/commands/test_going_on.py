"""A run that has ended goes on in its folder, with what was changed said and recorded."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.clusters.local_nodes import find_strays
from launcher.clusters.running.lock import read_lock
from launcher.holding import held_folder
from launcher.job import read_job
from resilience.agent.evidence.locks import hold_lock
from resilience.events import EventLog, read_events
from resilience.node_config import RunConfig
from resilience.run_record import open_record, read_record, read_starts
from tests.launcher.command import last_of_each, launch, put, refuse
from tests.launcher.local_world import end_all, ended_run, launcher_of, prepare, start_run, tell
from tests.launcher.real_runs import SMALL, go_on, named, steps, train
from tests.processes import wait_for_end
from tests.waiting import wait_until

TIERED = ("resilience/tiered=ram", "trainer.max_steps=60")


def files(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "cancelled.json"
    }


def end(run: Path, status: int) -> None:
    """Have a run end, and wait for that."""
    pid = launcher_of(run)
    tell(run, status)
    wait_for_end(pid)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    """Leave nothing of the runs in memory: some have failed, and keep their checkpoints there.

    A test that fails may leave a run that goes on.
    """
    yield
    end_all(tmp_path)
    for run in (tmp_path / "runs").glob("*"):
        launch("clean", str(run), folder=tmp_path)


def test_a_run_that_goes_on_is_ended_first(tmp_path: Path) -> None:
    prepare(tmp_path)
    run = start_run(tmp_path, *TIERED)
    ended = go_on(run)

    assert ended.status == 2
    assert "is running; end it first, with launcher cancel" in ended.err
    assert not (run / "record").exists()
    end(run, 0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "has succeeded, and its checkpoints went with the memory of its nodes"),
        (("trainer.max_steps=90",), "add trainer.schedule=keep to end their decay at step 60"),
        (("trainer.max_steps=90", "trainer.schedule=keep", "model.num_layers=1"), "model.num_lay"),
        (("trainer.max_step=90",), "closest: 'trainer.max_steps'"),
        (("run.detach=1",), "run.detach '1': allowed: true, false"),
        (("run.take_over=maybe",), "run.take_over 'maybe': allowed: true, false"),
        (("trainer.optimizer.lr=fast",), "trainer.optimizer.lr 'fast': allowed: a number"),
    ],
)
def test_what_cannot_go_on_is_refused_and_changes_nothing(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    run = ended_run(tmp_path, *TIERED)
    before = files(run)

    ended = go_on(run, *overrides)

    assert (ended.status, ended.err.count("Traceback")) == (2, 0)
    assert words in ended.err
    assert files(run) == before


def test_a_failed_run_starts_again_with_what_was_changed(tmp_path: Path) -> None:
    """And keeps the recipe that it began with."""
    prepare(tmp_path)
    run = start_run(tmp_path, *TIERED)
    end(run, 7)
    begun = (run / "recipe.yaml").read_text()
    digest = read_job(run / "job.json").digest()

    ended = go_on(run, "trainer.optimizer.lr=0.01", "trainer.log_every_n_steps=3")

    assert ended.status == 7, ended.err
    assert "  trainer.optimizer.lr: 0.003 -> 0.01\n" in ended.out
    job = read_job(run / "job.json")
    assert (job.trainer.optimizer.lr, job.trainer.log_every_n_steps) == (0.01, 3)
    assert read_job(run / "record" / "job-0.json").digest() == digest
    events = read_events(run / "events.jsonl")
    (told,) = [each.fields for each in events if each.event == "run_continued"]
    assert told == {"changes": ["trainer.optimizer.lr: 0.003 -> 0.01"]}
    starts = [each.fields["digest"] for each in events if each.event == "run_started"]
    assert starts == [digest, job.digest()]
    assert (run / "recipe.yaml").read_text() == begun
    again = launch(f"recipe={run}/recipe.yaml", "run.dir=again", folder=run.parent.parent)
    assert again.status == 0, again.err
    assert launch("report", str(run), folder=run.parent).status == 0
    assert "resilience/tiered=ram trainer.max_steps=60" in (run / "report.html").read_text()


def test_a_run_without_a_state_does_not_go_on(tmp_path: Path) -> None:
    ended = go_on(ended_run(tmp_path, "resilience.tiered=null", status=7))

    assert ended.status == 2
    assert "keeps no state to go on from: resilience.tiered is null" in ended.err


@pytest.mark.parametrize(("taken", "status"), [(60, 2), (6, 0)])
def test_a_run_that_did_not_start_to_be_longer_has_not_taken_all_its_steps(
    tmp_path: Path, taken: int, status: int
) -> None:
    """Its job has the new number of steps by then."""
    run = ended_run(tmp_path, "trainer.max_steps=60")
    with EventLog(run / "events-node-0.jsonl", node="node-0", rank=0, generation=0) as events:
        events.write("step", step=taken - 1, loss=1.0)

    ended = go_on(run)

    assert ended.status == status
    assert ("has taken all its 60 steps" in ended.err) == (status == 2)


def test_two_do_not_go_on_with_one_run_at_once(tmp_path: Path) -> None:
    run = ended_run(tmp_path, *TIERED, status=7)
    with held_folder(run):
        ended = go_on(run)

    assert ended.status == 1
    assert "another launcher or program works in" in ended.err


# ---- real runs


def test_a_finished_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    assert train(tmp_path, "a", "trainer.max_steps=6").status == 0
    run = tmp_path / "runs" / "a"

    ended = go_on(run, "trainer.max_steps=10")

    assert ended.status == 0, ended.err
    assert [each["start"] for each in steps(run)] == [0] * 6 + [1] * 4
    assert {each.step for each in named(run, "checkpoint_loaded")} == {6}
    record, starts = read_record(run), read_starts(run)
    assert record is not None
    assert [each.number for each in starts] == [0, 1]
    assert "  began     started 2 times\n" in launch("status", str(run), folder=tmp_path).out
    (entry,) = (run / "checkpoints").glob("*/owner/*.json")
    assert json.loads(entry.read_text())["run"] == record.run_id


@pytest.mark.slow
def test_a_run_whose_workers_are_started_again_has_the_bits_of_one_that_was_not_disturbed(
    tmp_path: Path,
) -> None:
    """Without recovery, by `trainer.max_restarts`, from the newest checkpoint in memory."""
    words = last_of_each(
        *SMALL,
        "resilience/tiered=ram",
        "resilience.tiered.ram.every_n_steps=10",
        "resilience.tiered.ram.replicas=0",
        "resilience.tiered.ram.domains_min=1",
        "trainer.num_devices=4",
        "trainer.max_restarts=1",
        "trainer.max_steps=200",
    )
    calm = launch(*words, "run.name=calm", folder=tmp_path)
    begun = launch(*words, "run.name=killed", "run.detach=true", folder=tmp_path)
    assert (calm.status, begun.status) == (0, 0), calm.err + begun.err
    run, other = (tmp_path / "runs" / each for each in ("killed", "calm"))
    launcher = launcher_of(run)
    wait_until(lambda: len(named(run, "checkpoint_saved")) >= 4)

    os.kill(named(run, "worker_started")[1].fields["pid"], signal.SIGKILL)
    wait_for_end(launcher)

    assert len(named(run, "worker_started")) == 8
    assert {each.step or 0 for each in named(run, "checkpoint_loaded")} != {0}
    assert len(steps(run)) == 200
    for key in ("loss", "grad_norm"):
        assert [each[key] for each in steps(run)] == [each[key] for each in steps(other)]
    weights = [each / "checkpoint" / "model.safetensors" for each in (run, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_another_batch_leaves_no_sample_out(tmp_path: Path) -> None:
    assert train(tmp_path, "a", "trainer.max_steps=5").status == 0
    run = tmp_path / "runs" / "a"

    ended = go_on(run, "trainer.max_steps=8", "trainer.global_batch_size=16")

    assert "  trainer.global_batch_size: 8 -> 16\n" in ended.out
    assert [each["num_samples"] for each in steps(run)] == [8, 16, 24, 32, 40, 56, 72, 88]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path: Path) -> None:
    assert train(tmp_path, "a", "trainer.max_steps=5").status == 0
    run = tmp_path / "runs" / "a"
    (run / "checkpoints").rename(tmp_path / "elsewhere")

    ended = go_on(run, "trainer.max_steps=8")

    assert ended.status == 1
    assert "was to go on from a checkpoint, and no tier has one in" in ended.err + ended.out
    assert len(steps(run)) == 5


@pytest.mark.slow
def test_a_run_whose_folder_was_deleted_neither_goes_on_nor_begins_anew(tmp_path: Path) -> None:
    store = ("resilience/tiered=folder", f"resilience.tiered.store.url=folder:{tmp_path}/store")
    assert train(tmp_path, "a", "trainer.max_steps=5", *store).status == 0
    shutil.rmtree(tmp_path / "runs" / "a")

    ended = train(tmp_path, "a", "trainer.max_steps=5", *store)

    assert ended.status == 2
    assert "belongs to llama/llama3_tiny_pretrain in" in ended.err + ended.out
    short = go_on(tmp_path / "runs" / "a", "trainer.max_steps=3", "run.take_over=true")
    assert short.status == 2
    assert "has step 5, beyond trainer.max_steps 3" in short.err + short.out
    owners = [path.read_text() for path in tmp_path.glob("store/*/owner/*.json")]
    assert len(owners) == 1, "what is of no use is left to who has it"
    taken = go_on(tmp_path / "runs" / "a", "trainer.max_steps=8", "run.take_over=true")
    assert taken.status == 0
    log = (tmp_path / "runs" / "a" / "logs" / "node-0.log").read_text()
    assert "which cannot be seen from here: end it where it runs" in log
    assert [each["start"] for each in steps(tmp_path / "runs" / "a")] == [2] * 3


@pytest.mark.slow
def test_a_run_that_lives_keeps_its_namespace(tmp_path: Path) -> None:
    """Another run is refused before anything of it is written."""
    url = f"resilience.tiered.store.url=folder:{tmp_path}/store"
    words = ("resilience/tiered=folder", url, "resilience.tiered.namespace=n")
    prepare(tmp_path)
    other, run = start_run(tmp_path, *words, "run.name=other"), tmp_path / "a"
    end(other, 5)
    run.mkdir()
    lock = hold_lock(run / "launcher.lock")
    config = RunConfig(recipe="llama/x", version=1, digest="d" * 64)
    owner = open_record(run, config, run_id="a" * 32, now=1.0).run_id
    entry = put(
        tmp_path / "store" / "n" / "owner" / f"{owner}.json",
        json.dumps({"run": owner, "name": f"llama/x in {run}"}),
    )
    before = entry.read_bytes()
    take = ("run.take_over=true", "run.detach=true")
    start = ("recipe=llama/llama3_tiny_pretrain", "run.name=b", *words, take[0])
    for command in (
        (*start, "action=run"),
        (*start, "action=submit", "cluster=slurm"),
        ("continue", str(other), *take),
    ):
        told = refuse(tmp_path, *command)

        assert f"the namespace 'n' of folder:{tmp_path}/store belongs to llama/x in {run}" in told
        assert f"which lives: a process holds the lock of {run}/launcher.lock" in told
        assert f"`launcher status {run}` shows it" in told
        assert entry.read_bytes() == before
    os.close(lock)

    assert go_on(other, *take).status == 0
    end(other, 5)


@pytest.mark.slow
def test_a_run_loses_its_namespace_once_its_processes_have_ended(tmp_path: Path) -> None:
    url = f"resilience.tiered.store.url=folder:{tmp_path}/store"
    words = (*SMALL, "resilience/tiered=folder", url, "resilience.tiered.store.every_n_steps=1")
    words = (*words, "resilience.tiered.ram.every_n_steps=1", "resilience.tiered.namespace=n")
    first = launch(
        *words, "run.name=a", "trainer.max_steps=100000", "run.detach=true", folder=tmp_path
    )
    assert first.status == 0, first.err
    run = tmp_path / "runs" / "a"
    wait_until(lambda: bool(named(run, "step_stored")))
    holder = read_lock(run)
    assert holder is not None
    pids = [holder.pid, *find_strays(holder.run_id)]
    (entry,) = (tmp_path / "store" / "n" / "owner").iterdir()
    before = entry.read_bytes()
    take = (*words, "run.name=b", "run.take_over=true", "trainer.max_steps=100000")
    for number in (signal.SIGCONT, signal.SIGSTOP):
        for pid in pids:
            os.kill(pid, number)

        refused = launch(*take, folder=tmp_path)

        assert refused.status == 2, refused
        assert f"belongs to llama/llama3_tiny_pretrain in {run}" in refused.err
        assert entry.read_bytes() == before
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    taken = launch(*take, "run.detach=true", folder=tmp_path)

    assert taken.status == 0, taken.err
    other = tmp_path / "runs" / "b"
    wait_until(lambda: bool(named(other, "checkpoint_loaded")))
    assert named(other, "checkpoint_loaded")[0].step
    assert "cannot be seen from here" not in (other / "logs" / "node-0.log").read_text()
    assert entry.exists() is False
    assert launch("cancel", str(other), folder=tmp_path).status == 0
