"""Runs that are started again: what was before is gone over, and old workers are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.attempts import BegunRun
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import StaleError
from resilience.tiered.vault import Vault
from tests.resilience.tiered.cluster import make_cluster, wait_held
from tests.resilience.tiered.daemons import (
    MIB,
    Daemon,
    load,
    make_content,
    make_id,
    make_meta,
    save,
)
from tests.resilience.tiered.kept import held, wait_until

Reopen = Callable[[], Vault]


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Reopen]:
    """Return what opens the vault of a folder, after it has ended the one before."""
    arenas: list[Arena] = []

    def open_() -> Vault:
        for each in arenas:
            each.close()
        arenas.append(Arena(tmp_path / "arena", 16 * MIB))
        return Vault(arenas[-1])

    yield open_
    arenas[-1].close()


def put(
    vault: Vault, step: int, generation: int, *, shard: str = "0", is_copy: bool = False
) -> None:
    shard_id = make_id(step, shard, generation=generation)
    with vault.begin(shard_id, 5, is_copy=is_copy) as writing:
        writing.memory[:] = b"hello"
        writing.commit(make_meta(shard_id, b"hello"))


@pytest.mark.parametrize(
    ("step", "generation", "is_copy", "is_stale"),
    [
        pytest.param(81, 5, False, True, id="of-the-old-run"),
        pytest.param(81, 5, True, True, id="a-copy-of-it"),
        pytest.param(80, 5, False, True, id="an-old-worker-that-lives-yet"),
        pytest.param(80, 5, True, False, id="a-copy-of-what-was-before-both"),
        pytest.param(81, 9, False, False, id="of-the-new-run"),
        pytest.param(70, 9, False, False, id="of-the-new-run-and-earlier"),
    ],
)
def test_a_run_that_goes_back_is_the_only_one_from_there_on(
    reopen: Reopen, step: int, generation: int, is_copy: bool, is_stale: bool
) -> None:
    vault = reopen()
    put(vault, 100, 5)
    vault.begin_run("run", step=80, first_generation=9)

    for number in range(2):
        vault = reopen() if number else vault
        if is_stale:
            with pytest.raises(StaleError, match="comes too late"):
                put(vault, step, generation, is_copy=is_copy)
        else:
            put(vault, step, generation, shard=str(number), is_copy=is_copy)


def test_what_was_begun_before_is_not_committed_after(reopen: Reopen) -> None:
    vault = reopen()
    shard_id = make_id(100, generation=5)
    with vault.begin(shard_id, 5) as writing:
        writing.memory[:] = b"hello"
        vault.begin_run("run", step=80, first_generation=9)
        with pytest.raises(StaleError):
            writing.commit(make_meta(shard_id, b"hello"))

    assert vault.find(shard_id) is None
    assert vault.free_bytes == vault.budget_bytes


def test_the_newest_run_counts_and_the_same_may_say_so_again(reopen: Reopen) -> None:
    vault = reopen()
    for _ in range(2):
        vault.begin_run("run", step=80, first_generation=9)
    with pytest.raises(StaleError, match="the run from 9 on went on from step 80"):
        vault.begin_run("run", step=60, first_generation=9)
    with pytest.raises(StaleError):
        vault.begin_run("run", step=60, first_generation=8)
    vault.begin_run("run", step=90, first_generation=12)
    vault.begin_run("other", step=5, first_generation=1)

    assert vault.runs() == {"run": (None, {9: 80, 12: 90}), "other": (None, {1: 5})}
    vault.begin_run("run", step=80, first_generation=13)
    assert vault.runs()["run"] == (None, {13: 80})


def test_a_run_is_known_when_nothing_is_held_and_until_another_job_begins(reopen: Reopen) -> None:
    """Other nodes may still have what is of an older one, and say only once where it began."""
    vault = reopen()
    vault.claim("run", "job").close()
    vault.begin_run("run", step=90, first_generation=7, job="job")
    claim = vault.claim("run", "job")
    claim.close()
    for again in (vault, reopen()):
        with pytest.raises(StaleError):
            again.begin(make_id(110, generation=6), 5, is_copy=True)
        assert again.job_of("run") is None
    again.claim("run", "another")

    assert again.runs() == {}
    assert again.job_of("run") == "another"


def go_back(client: TieredClient, step: int) -> int:
    first = client.go_back(step=step)
    assert client.go_back(step=step, first_generation=first) == first
    return first


def test_a_run_that_begins_anew_saves_where_an_older_one_was(tmp_path: Path) -> None:
    """Its generations begin at 0 again, though the node has seen 5, and steps beyond its own."""
    with Daemon(folder=tmp_path / "arena", options=["--keep", "3"]).start() as daemon:
        old, new = daemon.client(), daemon.client()
        for step in (80, 90, 100):
            save(old, make_id(step, generation=5), make_content(MIB, step))
        assert old.newest_run() is None

        first = go_back(new, 80)
        assert first > 5
        assert [each.step for each in new.steps()] == [80]
        wait_until(lambda: held(new) == [80], new.status)
        with pytest.raises(StaleError):
            save(old, make_id(100, generation=5), make_content(MIB, 1))
        with pytest.raises(StaleError):
            save(old, make_id(101, generation=5), make_content(MIB, 1))
        again = make_id(90, generation=first)
        save(new, again, make_content(MIB, 7))

        assert [(each.step, each.generation) for each in new.steps()] == [(90, first), (80, 5)]
        assert load(new, again) == make_content(MIB, 7)
        daemon.kill()
        later = daemon.start().client()
        assert later.newest_run() == BegunRun(first_generation=first, step=80)
        assert [each.step for each in later.steps()] == [90, 80]
        with pytest.raises(StaleError):
            save(later, make_id(100, generation=5), make_content(MIB, 1))


def test_other_nodes_are_told_that_a_run_has_gone_back(tmp_path: Path) -> None:
    with make_cluster(tmp_path, options=["--keep", "3"]) as cluster:
        cluster.start()
        a, b = cluster["a"].client(), cluster["b"].client()
        ids = [make_id(step, generation=5) for step in (80, 100)]
        for each in ids:
            save(a, each, make_content(MIB, each.step))
            wait_held(cluster["b"], each)

        first = a.go_back(step=80)

        wait_until(lambda: b.newest_run() == BegunRun(first_generation=first, step=80))
        wait_until(lambda: held(a) == held(b) == [80], b.status)
        with pytest.raises(StaleError):
            save(b, make_id(100, "1", generation=5), make_content(MIB))
        save(b, make_id(90, generation=first), make_content(MIB))
        wait_held(cluster["a"], make_id(90, generation=first))
