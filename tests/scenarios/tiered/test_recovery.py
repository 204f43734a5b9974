"""Runs that lose every copy of their state and go on from a checkpoint, by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilience.tiered.loader import whole_steps
from tests.cases import slow
from tests.resilience.tiered.daemons import Daemon
from tests.resilience.tiered.s3_server import s3_server
from tests.scenarios.recovery.conftest import undisturbed  # noqa: F401
from tests.scenarios.recovery.matrix import pack, spread_faults
from tests.scenarios.recovery.runs import check_same_bits, finish, run_job, start_run
from tests.scenarios.tiered.runs import (
    is_saved,
    loads,
    make_tiered_job,
    open_only,
    read_shards,
    saved_steps,
    start_nodes,
    tiered,
)
from tests.tokens import write_token
from tests.waiting import wait_until

NUM_STEPS = 40
SLOW = {"kind": "slow", "place": "data", "step": 18, "rank": 0, "seconds": 100}
"""Gives time to change the world between two steps."""
PATIENT = {"hang_deadline_s": 120, "stop_deadline_s": 15}


def check_went_on(outcome, undisturbed, trainer: str, *, sources: set[str], least: int) -> int:  # noqa: F811
    """Assert that all ranks went on from one checkpoint with the right bits; returns its step."""
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS))
    found = loads(outcome)
    assert [rank for rank, _, _ in found] == [0, 1, 2, 3]
    assert {source for _, _, source in found} <= sources
    (step,) = {step for _, step, _ in found}
    assert step is not None
    assert step >= least
    fallbacks = outcome.named("recovery_fallback")
    assert {each.step for each in fallbacks} == {step}
    assert {each.fields["source"] for each in fallbacks} <= sources
    return step


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "hybrid"])
def test_run_without_any_worker_goes_on_from_memory(tmp_path, undisturbed, trainer):  # noqa: F811
    job = make_tiered_job(trainer, max_steps=NUM_STEPS)

    with (
        start_nodes(tmp_path / "nodes") as nodes,
        start_run(tmp_path / "run", job, **nodes.variables("n0")) as run,
    ):
        run.wait_for(is_saved(15))
        wait_until(lambda: _is_whole(nodes["n0"], 15))
        run.kill_ranks(0, 1, 2, 3)
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    check_went_on(outcome, undisturbed, trainer, sources={"ram"}, least=15)
    assert not outcome.named("checkpoint_failed")


@contextmanager
def open_store(folder: Path, kind: str) -> Iterator[list[str]]:
    """Give the options for a store that gets each fifth step."""
    if kind == "folder":
        yield ["--store", f"folder:{folder / 'store'}", "--store-every-n-steps", "5"]
        return
    with s3_server(folder) as server:
        server.make_bucket("bucket")
        options = ["--store", "s3://bucket/runs", "--store-endpoint", server.endpoint]
        yield [*options, "--store-path-style", "--store-every-n-steps", "5"]


@pytest.mark.parametrize(
    ("trainer", "kind"), [slow("ddp", "folder"), ("hybrid", "folder"), slow("hybrid", "s3")]
)
def test_run_without_any_memory_goes_on_from_the_store(tmp_path, undisturbed, trainer, kind):  # noqa: F811
    job = make_tiered_job(trainer, max_steps=NUM_STEPS, faults=[SLOW], settings=PATIENT)

    with (
        open_store(tmp_path, kind) as options,
        start_nodes(tmp_path / "nodes", options=options) as nodes,
        start_run(tmp_path / "run", job, **nodes.variables("n0")) as run,
    ):
        run.wait_for_step(17)
        wait_until(lambda: _stored(nodes["n0"]) == [15])
        wait_until(lambda: not _lacks(nodes["n0"]))
        nodes.lose_memory()
        run.kill_ranks(0, 1, 2, 3)
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    step = check_went_on(outcome, undisturbed, trainer, sources={"ram", kind}, least=15)
    assert step == 15
    assert kind in {source for _, _, source in loads(outcome)}


def _is_whole(daemon: Daemon, least: int) -> bool:
    """Say whether all ranks have saved this step or a later one: rank 0 may be the first."""
    return any(each.step >= least for each in whole_steps(open_only(daemon)))


def _stored(daemon: Daemon) -> list[int]:
    """Return the newest step that the store has, of each namespace."""
    namespaces = daemon.client(None).status()["store"]["namespaces"]
    return [each["newest_step"] for each in namespaces.values()]


def _lacks(daemon: Daemon) -> list[int]:
    """Return the steps that the store has not got yet."""
    namespaces = daemon.client(None).status()["store"]["namespaces"]
    return [step for each in namespaces.values() for step in each["steps_waiting"]]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "hybrid"])
def test_job_that_is_started_again_goes_on_and_saves_again(tmp_path, undisturbed, trainer):  # noqa: F811
    """Its generations begin at 0 again, and what it saves is newer all the same."""
    job = make_tiered_job(trainer, max_steps=NUM_STEPS)
    with start_nodes(tmp_path / "nodes") as nodes:
        with start_run(tmp_path / "run", job, **nodes.variables("n0")) as run:
            run.wait_for(is_saved(15))
            wait_until(lambda: _is_whole(nodes["n0"], 15))
            run.kill_node("n0")

        with start_run(tmp_path / "run", job, **nodes.variables("n0")) as run:
            outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    step = check_went_on(outcome, undisturbed, trainer, sources={"ram"}, least=15)
    later = [each for each in saved_steps(outcome) if each > step]
    assert set(later) == set(range(step + 5, NUM_STEPS + 1, 5))
    assert not outcome.named("checkpoint_failed")


@pytest.mark.slow
def test_two_nodes_that_lose_all_workers_and_one_memory(tmp_path, undisturbed):  # noqa: F811
    """Each node has a whole copy; the one that lost its memory reads from the other, over TLS."""
    names, token = ("n0", "n1"), write_token(tmp_path / "token")
    options = ("--tls", f"--token-file={token}")
    job = make_tiered_job(
        "hybrid", max_steps=NUM_STEPS, num_nodes=2, num_devices=2, faults=[SLOW], settings=PATIENT
    )

    with start_nodes(tmp_path / "nodes", names, options=options) as nodes:
        own = {"MEMORYD_TOKEN_FILE": str(token)}
        variables = {each: nodes.variables(each) | own for each in names}
        with start_run(
            tmp_path / "run", job, nodes=names, by_node=variables, options=options
        ) as run:
            run.wait_for_step(17)
            nodes.lose_memory("n1")
            run.kill_ranks(0, 1, 2, 3)
            outcome = finish(run)

    assert outcome.statuses == [0, 0], run.log()
    check_went_on(outcome, undisturbed, "hybrid", sources={"ram", "peer:n0"}, least=15)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "hybrid"])
def test_what_is_saved_through_faults_is_what_is_saved_without(tmp_path, trainer):
    """No step of another outcome, no half an update, no mixture is ever visible."""
    (faults,) = pack(spread_faults(trainer), 70)
    keep_all = ["--keep", "100"]
    shards = []
    for name, each in (("calm", []), ("faulty", faults)):
        job = make_tiered_job(trainer, max_steps=70, faults=each, tiers=tiered(every_n_steps=1))
        with start_nodes(tmp_path / name, options=keep_all) as nodes:
            outcome = run_job(tmp_path / f"run-{name}", job, **nodes.variables("n0"))
            assert outcome.statuses == [0], outcome.folder
            shards.append(read_shards(nodes["n0"]))

    calm, faulty = shards
    assert {step for step, _ in calm} == set(range(1, 71))
    assert len({step for step, _ in faulty}) >= 60
    assert [key for key in faulty if faulty[key] != calm[key]] == []


@pytest.mark.slow
def test_seconds_are_counted_by_one_rank_for_all(tmp_path):
    job = make_tiered_job("hybrid", max_steps=6, tiers=tiered(every_n_steps=None, every_s=0.0001))

    with start_nodes(tmp_path / "nodes", options=["--keep", "100"]) as nodes:
        outcome = run_job(tmp_path / "run", job, **nodes.variables("n0"))
        found = whole_steps(open_only(nodes["n0"]))

    assert outcome.statuses == [0], outcome.folder
    # The last one is saved whatever the seconds.
    assert saved_steps(outcome) == [1, 2, 3, 4, 5, 6]
    assert [each.step for each in found] == [6, 5, 4, 3, 2, 1]
