from __future__ import annotations

import math
from pathlib import Path

import pytest

from launcher.job import Job
from tests.cases import grid, slow
from tests.recipes_training.conftest import Reference
from tests.recipes_training.jobs import GPT_OSS, make_job
from tests.recipes_training.workers import Outcome

LAYOUTS = [
    slow("none", None, 1, id="ddp-1"),
    pytest.param("none", None, 2, id="ddp-2"),
    slow("none", None, 4, id="ddp-4"),
    slow("full", None, 1, id="full-1"),
    slow("full", None, 2, id="full-2"),
    slow("full", None, 4, id="full-4"),
    slow("hybrid", 1, 1, id="hybrid-1x1"),
    slow("hybrid", 2, 2, id="hybrid-2x1"),
    pytest.param("hybrid", 2, 4, id="hybrid-2x2"),
]


def _job(sharding: str, num_replicas: int | None, num_workers: int, **parts: object) -> Job:
    trainer = {
        "sharding": sharding,
        "num_replicas": num_replicas,
        "num_devices": num_workers,
        "max_steps": 20,
        **parts.pop("trainer", {}),  # type: ignore[dict-item]
    }
    return make_job(trainer=trainer, **parts)


@pytest.fixture
def single(reference: Reference) -> Outcome:
    """The run of one worker that all others are compared with."""
    return reference(_job("none", None, 1))


@pytest.mark.parametrize(("sharding", "num_replicas", "num_workers"), LAYOUTS)
def test_run_has_same_bits_twice_and_losses_of_single_worker(
    workers, tmp_path, single, sharding, num_replicas, num_workers
):
    job = _job(sharding, num_replicas, num_workers)

    first = workers.run(job, tmp_path / "first")
    second = workers.run(job, tmp_path / "second")

    assert first.losses == second.losses
    assert first.weights() == second.weights()
    assert first.losses == pytest.approx(single.losses, rel=1e-5)
    assert [each["grad_norm"] for each in first.steps] == pytest.approx(
        [each["grad_norm"] for each in single.steps], rel=1e-4
    )


def test_loss_falls(single):
    assert single.losses[-1] < single.losses[0] - 0.5
    assert single.losses[0] == pytest.approx(math.log(259), abs=0.3)


@pytest.mark.parametrize(
    ("sharding", "num_replicas"),
    [
        slow("none", None, id="ddp"),
        slow("full", None, id="full"),
        pytest.param("hybrid", 2, id="hybrid"),
    ],
)
def test_gpt_oss_has_losses_of_single_worker(workers, reference, tmp_path, sharding, num_replicas):
    alone = reference(_job("none", None, 1, model=GPT_OSS))
    job = _job(sharding, num_replicas, 4, model=GPT_OSS)

    outcome = workers.run(job, tmp_path)

    assert outcome.losses == pytest.approx(alone.losses, rel=1e-5)
    assert outcome.losses[-1] < outcome.losses[0] - 0.5


@pytest.mark.slow
def test_tied_embeddings_stay_tied_when_sharded(workers, reference, tmp_path):
    alone = reference(_job("none", None, 1, model={"tie_embeddings": True}))
    job = _job("full", None, 2, model={"tie_embeddings": True})

    outcome = workers.run(job, tmp_path / "sharded")

    assert outcome.losses == pytest.approx(alone.losses, rel=1e-5)
    assert "lm_head.weight" not in outcome.weights()


@pytest.mark.parametrize(
    ("sharding", "num_workers", "model"),
    grid(
        [pytest.param("none", 1, id="ddp"), pytest.param("full", 2, id="full")],
        [pytest.param({}, id="llama"), pytest.param(GPT_OSS, id="gpt-oss")],
        fast={"ddp-llama"},
    ),
)
def test_activation_checkpointing_keeps_bits(workers, tmp_path, sharding, num_workers, model):
    trainer = {"max_steps": 4}
    kept = _job(sharding, None, num_workers, trainer=trainer, model=model)
    job = _job(
        sharding,
        None,
        num_workers,
        model=model,
        trainer={**trainer, "activation_checkpointing": True},
    )

    plain = workers.run(kept, tmp_path / "plain")
    outcome = workers.run(job, tmp_path / "checkpointing")

    assert outcome.losses == plain.losses
    assert outcome.weights() == plain.weights()


@pytest.mark.parametrize(
    ("sharding", "num_replicas", "num_workers"),
    [
        pytest.param("none", None, 1, id="ddp-1"),
        slow("none", None, 2, id="ddp-2"),
        slow("full", None, 2, id="full"),
        slow("hybrid", 2, 4, id="hybrid"),
    ],
)
def test_accumulation_equals_one_large_micro_batch(
    workers, tmp_path, single, sharding, num_replicas, num_workers
):
    job = _job(sharding, num_replicas, num_workers, trainer={"micro_batch_size": 1})

    outcome = workers.run(job, tmp_path)

    assert outcome.losses == pytest.approx(single.losses, rel=1e-5)


def test_seed_changes_weights_and_order(workers, tmp_path, single):
    outcome = workers.run(_job("none", None, 1, trainer={"seed": 8}), tmp_path)

    assert outcome.losses[0] != single.losses[0]


def test_every_event_of_every_rank(workers, tmp_path):
    job = _job("none", None, 2, trainer={"max_steps": 8, "log_every_n_steps": 3})

    outcome = workers.run(job, tmp_path)

    for event in ("worker_started", "process_group_ready", "data_ready", "model_ready"):
        assert sorted(each.rank for each in outcome.named(event)) == [0, 1]
    assert sorted(each.rank for each in outcome.named("worker_finished")) == [0, 1]
    assert {each.rank for each in outcome.events if each.step is not None} == {0}
    assert [each["step"] for each in outcome.steps] == [0, 3, 6, 7]
    assert [each["num_samples"] for each in outcome.steps] == [8, 32, 56, 64]
    assert all(each["duration_s"] > 0 for each in outcome.steps)
    assert next(each.event for each in outcome.events if each.rank == 0) == "worker_started"
    (written,) = outcome.named("checkpoint_written")
    assert Path(written.fields["path"]) == tmp_path / "checkpoint"


def test_without_checkpoint_none_is_written(workers, tmp_path):
    outcome = workers.run(make_job(trainer={"save_checkpoint": False}), tmp_path)

    assert not outcome.named("checkpoint_started")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events-node-0.jsonl",
        "job.json",
        "worker-0.log",
    ]
