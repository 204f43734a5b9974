"""Runs that are started again: what was before is gone over, and old workers are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience.tiered.attempts import BegunRun
from resilience.tiered.client import TieredClient
from resilience.tiered.errors import StaleError
from tests.resilience.tiered.cluster import make_cluster, wait_held
from tests.resilience.tiered.daemons import (
    MIB,
    Daemon,
    load,
    make_content,
    make_id,
    save,
)
from tests.resilience.tiered.kept import held, wait_until


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
