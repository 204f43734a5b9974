"""Runs without recovery that begin from a checkpoint, and what a daemon does to a run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from recipes_training.backends.aws_library import PACKAGE
from recipes_training.backends.choice import open_checkpoints
from recipes_training.errors import TrainingError
from resilience.events import EventLog
from resilience.tiered.client import TieredClient
from tests.recipes_training.jobs import make_job
from tests.recipes_training.workers import Outcome, Workers
from tests.resilience.tiered.daemons import make_content, make_id, save
from tests.scenarios.tiered.runs import Nodes, folder_store, saved_steps, start_nodes, tiered
from tests.scenarios.tiered.test_aws import aws_job


def plain_job(max_steps: int, *, num_devices: int = 2, **tiers: Any) -> Job:
    """Return a sharded job whose learning rates do not depend on its number of steps."""
    return make_job(
        trainer={
            "num_devices": num_devices,
            "sharding": "full",
            "max_steps": max_steps,
            "optimizer": {"decay_steps": 400},
        },
        resilience={"tiered": tiered(every_n_steps=4, **tiers)},
    )


def train(workers: Workers, nodes: Nodes, folder: Path, job: Job, **options: Any) -> Outcome:
    return workers.run(job, folder, variables=nodes.variables("n0"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_run_goes_on_without_its_daemon(
    tmp_path: Path, workers: Workers, how: signal.Signals
) -> None:
    """It says so once; that its checkpoints fail is all."""
    with start_nodes(tmp_path / "nodes") as nodes:
        process = nodes["n0"].process
        assert process is not None
        variables = {"TEST_DAEMON": str(process.pid), "TEST_SIGNAL": str(int(how))}
        outcome = workers.run(
            plain_job(10),
            tmp_path / "run",
            target="tests.scenarios.tiered.programs:lose_daemon",
            variables={**nodes.variables("n0"), **variables},
        )

    assert saved_steps(outcome) == [4]
    failed = outcome.named("checkpoint_failed")
    assert {(each.rank, each.step) for each in failed} >= {(0, 8), (1, 8)}
    for rank in range(2):
        assert outcome.log(rank).count("no checkpoint of step 8: ") == 1
        assert outcome.log(rank).count("the run goes on") == 1


@pytest.mark.slow
def test_full_daemon_costs_a_run_its_checkpoints_alone(tmp_path: Path, workers: Workers) -> None:
    with start_nodes(tmp_path / "nodes") as nodes:
        other = nodes["n0"].client("other")
        save(other, make_id(name="other"), make_content((64 << 20) - (128 << 10)))
        outcome = train(workers, nodes, tmp_path / "run", plain_job(10))

    failed = outcome.named("checkpoint_failed")
    assert failed
    assert "bytes needed" in failed[0].fields["reason"]
    assert outcome.log().count("bytes needed") <= 2


def test_namespace_of_another_job_is_a_users_error(tmp_path: Path, workers: Workers) -> None:
    with start_nodes(tmp_path / "nodes") as nodes:
        taken: TieredClient = nodes["n0"].client("taken")
        save(taken, make_id(name="taken"), make_content(100))
        job = plain_job(10, namespace="taken")
        outcome = train(workers, nodes, tmp_path / "run", job, is_success_expected=False)

    # Who ends first is that of the run; the other one may be killed by then.
    assert 2 in outcome.statuses
    text = outcome.log()
    assert "recipes_training: the namespace 'taken' belongs to the job 'job'" in text
    assert "begin anew with resilience.tiered.namespace=NAME" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("job", "words"),
    [
        pytest.param(
            plain_job(10, store=folder_store("", url=None, every_n_steps=4)),
            r"^resilience\.tiered\.store\.url is null",
            id="name-of-the-store",
        ),
        pytest.param(plain_job(10), "^the variable MEMORYD_DIR is not set", id="daemon"),
        pytest.param(
            aws_job(4),
            f"^resilience.tiered.backend 'aws' needs the package {PACKAGE}",
            id="library",
        ),
    ],
)
def test_run_does_not_begin_without_what_its_checkpoints_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job, words: str
) -> None:
    monkeypatch.delenv("MEMORYD_DIR", raising=False)

    with (
        EventLog(tmp_path / "events.jsonl", node="n0", rank=0, generation=0) as events,
        pytest.raises(TrainingError, match=words),
    ):
        open_checkpoints(job, run_dir=tmp_path, node="n0", events=events)
