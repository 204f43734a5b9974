"""A new run begins with a state of another one, which stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.events import EventLog
from resilience.run_record import read_record
from tests.launcher.command import Ended, launch
from tests.launcher.local_world import ended_run, put_steps, tell
from tests.launcher.real_runs import go_on, named, steps, train


def branch(run: Path, *words: str, at: str = "") -> Ended:
    return launch("branch", f"{run}{at}", *words, folder=run.parent.parent)


@pytest.fixture
def clean(tmp_path: Path) -> Iterator[None]:
    """Leave nothing of real runs in memory."""
    yield
    for run in (tmp_path / "runs").glob("*"):
        launch("clean", str(run), folder=tmp_path)


def start(folder: Path, *words: str) -> Path:
    return ended_run(folder, "trainer.max_steps=60", *words)


@pytest.mark.parametrize(
    ("words", "at", "text"),
    [
        ((), "@9", "/checkpoints; the store has 60, 5"),
        ((), "@last", "behind @ stands a step, a whole number"),
        ((), "@60", "trainer.max_steps 60: the run would begin with step 60, and have nothing to"),
        (("model.num_layers=1",), "@5", "model.num_layers"),
        (("trainer.max_step=9",), "@5", "closest: 'trainer.max_steps'"),
        (("run.detach=perhaps",), "@5", "run.detach 'perhaps': allowed: true, false"),
        (("run.name=A b",), "@5", "'A b'"),
        (("resilience.tiered=null",), "@5", "is a section"),
    ],
)
def test_what_cannot_branch_is_refused_and_writes_nothing(
    tmp_path: Path, words: tuple[str, ...], at: str, text: str
) -> None:
    run = start(tmp_path)
    put_steps(run, 5, 60)

    ended = branch(run, *words, at=at)

    assert (ended.status, ended.err.count("Traceback")) == (2, 0), ended.err
    assert text in ended.err
    assert [each.name for each in (tmp_path / "runs").iterdir()] == [run.name]


def test_what_a_run_has_gone_back_behind_is_no_state_of_it(tmp_path: Path) -> None:
    run = start(tmp_path)
    put_steps(run, 5, 30)
    put_steps(run, 9, generation=7)

    newest = branch(run, "trainer.max_steps=9", "trainer.schedule=keep")
    left = branch(run, at="@30")

    assert (newest.status, left.status) == (2, 2)
    assert "the run would begin with step 9, and have nothing to do" in newest.err
    assert "step 30 of llama3-tiny-pretrain is not in folder:" in left.err
    assert left.err.strip().endswith("; the store has 9, 5")

    # Damaged, it hides no other, and says all the same what is over.
    (description,) = run.rglob("steps/000000000009-g7/*.json")
    description.write_text("{}")
    newest = branch(run, "trainer.max_steps=5", "trainer.schedule=keep")
    damaged, left = branch(run, at="@9"), branch(run, at="@30")

    assert "the run would begin with step 5, and have nothing to do" in newest.err
    assert "step 9 of llama3-tiny-pretrain is damaged: " in newest.err
    assert "step 9 of llama3-tiny-pretrain is damaged (" in damaged.err
    assert "step 30 of llama3-tiny-pretrain is not in folder:" in left.err
    assert all(each.err.strip().endswith("; the store has 5") for each in (damaged, left))


def test_newest_step_is_the_one_that_the_run_has_gone_on_from(tmp_path: Path) -> None:
    """The store knows it only when something newer is there."""
    run = start(tmp_path)
    put_steps(run, 5, 30)
    with EventLog(run / "events.jsonl", node="node-0", rank=0, generation=0) as events:
        events.write("step_stored", step=30, store="folder:checkpoints")
        events.write("checkpoint_loaded", step=5, source="folder", num_bad=0)

    ended = branch(run, "trainer.max_steps=5", "trainer.schedule=keep")

    assert ended.status == 2
    assert "the run would begin with step 5, and have nothing to do" in ended.err


def test_a_run_whose_store_has_nothing_whole_has_no_branches(tmp_path: Path) -> None:
    run = start(tmp_path)

    nothing = branch(run)
    put_steps(run, 5, of=2)
    torn = branch(run, at="@5")

    assert (nothing.status, torn.status) == (2, 2)
    store = f"folder:{run}/checkpoints"
    assert nothing.err.strip() == f"the store {store} has no whole step of llama3-tiny-pretrain"
    assert torn.err.strip() == (
        f"step 5 of llama3-tiny-pretrain is not in {store}; the store has no whole step"
    )
    assert [each.name for each in (tmp_path / "runs").iterdir()] == [run.name]


def test_a_store_that_is_not_seen_from_here_is_told_by_the_events(tmp_path: Path) -> None:
    s3 = ("resilience/tiered=s3", "resilience.tiered.store.url=s3://bucket/runs")
    run = start(tmp_path, *s3)

    ended = branch(run)

    assert ended.status == 2
    assert "no event here says that a step of llama3-tiny-pretrain is in its store" in ended.err


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ("resilience.tiered=null", "keeps no state; a branch needs a run with a store of ours"),
        ("resilience/tiered=ram", "keeps its states where no other run reads"),
    ],
)
def test_a_run_without_a_store_has_no_branches(tmp_path: Path, tiers: str, text: str) -> None:
    run = start(tmp_path, tiers)

    ended = branch(run, at="@5")

    assert ended.status == 2
    assert text in ended.err


def test_a_namespace_that_is_named_is_not_shared(tmp_path: Path) -> None:
    run = start(tmp_path, "resilience.tiered.namespace=mine")
    put_steps(run, 5)

    refused = branch(run, "resilience.tiered.namespace=mine")

    assert refused.status == 2
    assert "namespace 'mine' is that of llama3-tiny-pretrain; a branch has" in refused.err


def test_a_branch_has_a_folder_and_a_name_of_its_own(tmp_path: Path) -> None:
    run = start(tmp_path)
    put_steps(run, 4, 5)

    first = branch(run, "trainer.optimizer.lr=0.01", "run.detach=true")
    second = branch(run, "run.name='other'", "run.detach=true")

    assert (first.status, second.status) == (0, 0), first.err + second.err
    runs = tmp_path / "runs"
    assert sorted(each.name for each in runs.iterdir()) == [
        "llama3-tiny-pretrain", "llama3-tiny-pretrain-branch", "other",
    ]  # fmt: skip
    where = f"with step 5 of llama3-tiny-pretrain in {run}"
    assert f"llama3-tiny-pretrain-branch begins in {runs / 'llama3-tiny-pretrain-branch'} {where}" \
        in first.out  # fmt: skip
    (told,) = named(runs / "llama3-tiny-pretrain-branch", "run_branched")
    assert told.fields["changes"] == ["trainer.optimizer.lr: 0.003 -> 0.01"]
    assert told.fields["from_step"] == 5
    for each in ("llama3-tiny-pretrain-branch", "other"):
        tell(runs / each, 0)
        launch("cancel", str(runs / each), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_a_branch_has_the_bits_of_the_run_that_it_leaves(tmp_path: Path) -> None:
    """It leaves the other as it is, and goes on once that is gone."""
    assert train(tmp_path, "whole", "trainer.max_steps=14").status == 0
    assert train(tmp_path, "trunk", "trainer.max_steps=8").status == 0
    whole, trunk, leaf = (tmp_path / "runs" / name for name in ("whole", "trunk", "trunk-branch"))
    kept = {path: path.read_bytes() for path in trunk.rglob("checkpoints/**/*") if path.is_file()}

    ended = branch(trunk, "trainer.max_steps=11")
    assert ended.status == 0, ended.err + ended.out

    assert {path: path.read_bytes() for path in kept} == kept
    record = read_record(leaf)
    assert record is not None
    assert record.branch is not None
    assert (record.branch.step, str(trunk) in record.branch.run) == (8, True)
    began = f"  began     with step 8 of trunk in {trunk}\n"
    assert began in launch("status", str(leaf), folder=tmp_path).out
    shutil.rmtree(trunk)
    assert go_on(leaf, "trainer.max_steps=14").status == 0
    assert [each["loss"] for each in steps(leaf)] == [each["loss"] for each in steps(whole)][8:]
    weights = [each / "checkpoint" / "model.safetensors" for each in (whole, leaf)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_a_branch_of_a_damaged_step_ends_in_its_own_words(tmp_path: Path) -> None:
    assert train(tmp_path, "trunk", "trainer.max_steps=5").status == 0
    trunk = tmp_path / "runs" / "trunk"
    newest = max(trunk.glob("checkpoints/*/data/*"), key=lambda path: path.stat().st_mtime)
    newest.write_bytes(bytes(newest.stat().st_size))

    ended = branch(trunk, "trainer.max_steps=9")

    told = ended.out + ended.err
    assert ended.status == 1
    assert (
        "step 5: no copy of shard 0 of step 5 can be read: its bytes in the store are not" in told
    )
    assert "or branch from another step" in told
    assert "Traceback" not in told
    again = branch(trunk, "trainer.max_steps=9", at="@1")
    assert again.status == 0, again.out + again.err


def test_a_branch_that_is_not_submitted_leaves_its_folder_free(tmp_path: Path) -> None:
    store = f"resilience.tiered.store.url=folder:{tmp_path}/store"
    words = ("recipe=llama/llama3_tiny_pretrain", "cluster=slurm", "trainer.max_steps=60")
    launch(*words, "resilience/tiered=folder", store, "run.dir=runs/a", folder=tmp_path)
    run = tmp_path / "runs" / "a"
    (run / "submitted.json").write_text('{"job_id": "7"}')

    ended = launch("branch", f"{run}@5", folder=tmp_path, env={"PATH": "/nowhere"})

    assert ended.status == 1
    assert "sbatch" in ended.err
    assert not (tmp_path / "runs" / "llama3-tiny-pretrain-branch" / "submitted.json").exists()
