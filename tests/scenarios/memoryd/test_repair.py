"""Damaged copies, in memory and in a store: found by who reads them, and made good from another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilience.tiered.client import TieredClient
from resilience.tiered.errors import TierError
from resilience.tiered.shard import ShardId
from tests.resilience.tiered.cluster import count_held, load_own, make_cluster, wait_held
from tests.resilience.tiered.daemons import MIB, Daemon, make_content, make_id, save, segments
from tests.resilience.tiered.kept import lose_memory, stored, wait_until

SIZE = MIB + 3
CONTENT = make_content(SIZE, 1)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        byte = file.read(1)[0]
        file.seek(SIZE // 2)
        file.write(bytes([byte ^ 8]))
        file.flush()
        os.fsync(file.fileno())


def damage(daemon: Daemon) -> None:
    for each in segments(daemon.folder):
        flip(each)


def tell_bad(client: TieredClient, shard_id: ShardId) -> None:
    with client.read(
        step=shard_id.step, generation=shard_id.generation, shard=shard_id.shard
    ) as loan:
        assert loan.bad()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_copy_that_went_because_it_was_damaged_comes_again(tmp_path: Path, name: str) -> None:
    """On the node that it was written to, and on the one that had a copy."""
    with make_cluster(tmp_path) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), CONTENT)
        wait_held(cluster["b"], make_id())
        damage(cluster[name])
        tell_bad(cluster[name].client(), make_id())

        wait_held(cluster[name], make_id())
        assert load_own(cluster[name], make_id()) == CONTENT


def test_a_node_drops_what_another_one_got_damaged_from_it(tmp_path: Path) -> None:
    with make_cluster(tmp_path, options=["--replicas", "0", "--domains-min", "1"]) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), CONTENT)
        damage(cluster["a"])
        with cluster["b"].client() as client:
            wait_until(lambda: bool(client.steps()), cluster["b"].client(None).status)

        with pytest.raises(TierError, match="cannot be had"):
            load_own(cluster["b"], make_id())
        wait_until(lambda: not count_held(cluster["a"], make_id()))


@pytest.mark.slow
def test_what_was_damaged_in_the_store_is_sent_again(tmp_path: Path) -> None:
    """By the node that has it in memory; it was another one that has found it damaged."""
    store = tmp_path / "store"
    words = ["--store", f"folder:{store}", "--peer-gone-s", "1"]
    options = [*words, "--replicas", "0", "--domains-min", "1"]
    with make_cluster(tmp_path, options=options) as cluster:
        cluster.start()
        save(cluster["a"].client(), make_id(), CONTENT)
        wait_until(lambda: bool(stored(store, "steps")))
        cluster["a"].end()
        (data,) = stored(store)
        flip(data)
        with pytest.raises(TierError, match="cannot be had"):
            load_own(cluster["b"], make_id())
        assert cluster["b"].client().status()["store"]["num_bad"] == 1
        assert data.read_bytes() != CONTENT

        cluster.start("a")
        wait_until(lambda: data.read_bytes() == CONTENT)
        wait_until(lambda: cluster["b"].client().status()["store"]["num_bad"] == 0)
        assert "was damaged in folder:" in lose_memory(cluster["a"])
        assert [each.step for each in cluster["b"].client().steps()] == [1]
        assert load_own(cluster["b"], make_id()) == CONTENT
